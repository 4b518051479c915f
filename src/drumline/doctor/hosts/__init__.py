"""Several hosts that check each other -> findings; what each module does stands in `doctor`."""
