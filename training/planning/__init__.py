"""What a run will take, before it is begun."""
