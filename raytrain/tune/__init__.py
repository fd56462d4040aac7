"""Sweeps: hyperparameter searches over elastic runs, with Ray Tune."""
