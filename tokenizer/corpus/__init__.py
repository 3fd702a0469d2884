"""Text from files and the Hub, as documents."""
