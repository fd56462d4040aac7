"""Checkpoints that are complete or absent: the state of a run as files, where they lie, and which of them are kept.

`state` turns a live run into files and back, `store` writes and verifies them, `retention` chooses what may go, and
`saver` does all of that behind the training thread's back.
"""
