"""Would a run work on this cluster? `examine` visits each node, `verdicts` judges what it found, `table` shows it."""
