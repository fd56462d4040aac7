"""What one does to a cluster besides training on it: rehearse faults."""
