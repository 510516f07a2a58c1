"""How bytes move between ranks: one communicator a file, all behind the contract in `communicator.py`."""
