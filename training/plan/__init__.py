"""Everything that is decided about a run before its first step."""
