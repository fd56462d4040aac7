"""Runs a task on Ray: checks, connection, resume, training, and the result."""
