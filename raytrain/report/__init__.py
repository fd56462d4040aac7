"""What a run amounts to afterwards, from its events; imports neither torch nor ray."""
