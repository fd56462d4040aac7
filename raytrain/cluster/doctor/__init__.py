"""Would a run work on this cluster? `examine` starts a `probe` on each node, `verdicts` judges, `table` renders."""
