"""A job on a cluster: what is uploaded, what it is given, how its log is followed, and when it is submitted again."""
