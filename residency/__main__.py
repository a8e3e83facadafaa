"""`python -m residency`: the same as the console script."""

import sys

from residency.cli import main

if __name__ == "__main__":
    sys.exit(main())
