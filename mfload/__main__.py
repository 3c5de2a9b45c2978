"""`python -m mfload` is the command `mfload`."""

import sys

from mfload.cli import main

if __name__ == "__main__":
    sys.exit(main())
