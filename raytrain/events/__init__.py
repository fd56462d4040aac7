"""What happened in a run: the kinds of events, the log that keeps them, and what they add up to."""
