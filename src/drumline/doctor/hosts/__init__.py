"""Several hosts that check each other -> findings; the modules are described in `doctor`."""
