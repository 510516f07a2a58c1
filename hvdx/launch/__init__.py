"""hvdxrun: one file for each way of starting ranks, and pure functions for what must be decided before."""
