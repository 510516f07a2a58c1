"""Where gradients become global: the reducer, and the optimizer and tape in front of it."""
