"""How a token store is made."""
