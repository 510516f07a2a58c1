"""Scaling on paper: what a step will take on so many ranks, from the cost models of `hvdx/comm/algorithms`."""
