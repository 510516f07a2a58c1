"""tf.distribute strategies over hvdx: who takes part, where the members meet, and one strategy for each mode."""
