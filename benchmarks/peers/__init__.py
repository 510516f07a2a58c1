"""The peers, one a file: start(argument) joins the other ranks and returns a Session. Run by benchmarks.rank only."""
