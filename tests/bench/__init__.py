"""How fast it is: scenarios that print figures, run by make bench."""
