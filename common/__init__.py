"""What all commands share. Imports no other package of this project."""
