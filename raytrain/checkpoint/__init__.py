"""Checkpoints are complete or absent.

`state` converts a live run to files and back, `store` writes and verifies them, `manifest` defines what a checkpoint is and
which ones are kept, and `saver` does all of that in a background thread.
"""
