"""Sweeps: many runs of one task with different hyperparameters, side by side."""
