"""Data for several ranks: every rank its own part, equally many steps, and work that is done once per host."""
