"""The token store: format and reader."""
