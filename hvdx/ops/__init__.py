"""The collectives a TensorFlow program can call; one operation a file, named as MPI names it."""
