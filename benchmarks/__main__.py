"""`python -m benchmarks`: the driver's command line."""

import sys

from benchmarks.driver import main

if __name__ == "__main__":
    sys.exit(main())
