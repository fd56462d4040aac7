"""Assembles a run on Ray: checks, connections, resume, the trainer, and its result."""
