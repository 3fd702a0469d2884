"""Rules that change or drop documents."""
