"""What a run looks like while it goes on, from its events; imports neither torch nor ray."""
