"""The order of the rows and the layout of logical workers, as pure functions of integers."""
