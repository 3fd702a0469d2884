"""Text -> ids."""
