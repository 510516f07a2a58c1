"""Measures hvdx beside Horovod, TensorFlow, PyTorch and MPI in one run: `python -m benchmarks --help`."""
