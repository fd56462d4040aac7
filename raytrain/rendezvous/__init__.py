"""Who trains together: a pure state machine, and the actor and client that carry it."""
