"""Which workers train together: a pure state machine, and the Ray actor and client around it."""
