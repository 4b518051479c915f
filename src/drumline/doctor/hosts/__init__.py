"""Several hosts that look at each other -> findings."""
