"""Who may ask for what, when: keys, quotas, classes, the queue, runaway streams. Pure: the caller passes the time."""
