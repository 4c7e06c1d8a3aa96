"""`python -m ariadne`: the command line."""

import sys

from ariadne.cli import main

if __name__ == "__main__":
    sys.exit(main())
