"""``jaxinfer fetch``: bring a known model to this machine."""

import argparse
import sys

from jaxinfer.cli.output.progress import byte_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fetch``."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", default="smollm2-135m-instruct", help="known model (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Fetch the model and print where it stands."""
    # Imported here: it brings the hub's client.
    from jaxinfer.checkpoint.hub.fetch import fetch

    with byte_progress(options.name) as progress:
        path = fetch(options.name, notice=lambda line: print(line, file=sys.stderr), progress=progress)
    print(path)
    return 0
