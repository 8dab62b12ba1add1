"""Runs the command line: ``python -m jaxinfer``."""

import sys

from jaxinfer.cli.main import console

if __name__ == "__main__":
    sys.exit(console())
