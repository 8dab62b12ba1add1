"""``jaxinfer convert``: write a model as a folder of our own, its weights in Orbax's format."""

import argparse
import sys

from jaxinfer.cli.output.progress import byte_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``."""
    parser.add_argument("source", metavar="SRC", help="hub id, folder, .gguf file or llama2.c .bin file")
    parser.add_argument("destination", metavar="DST", help="folder to write; it appears when it is complete")
    parser.add_argument(
        "--dtype", metavar="D", help="dtype of all tensors (default: as stored; quantised tensors become float32)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if jaxinfer wrote it")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub model")


def run(options: argparse.Namespace) -> int:
    """Convert with a progress bar and say where the folder stands, all on standard error."""
    # Imported here: --help and mistakes in the options do not wait for JAX.
    from jaxinfer.checkpoint.convert import convert
    from jaxinfer.jax_setup import prepare_jax

    prepare_jax()
    with byte_progress(options.source.rstrip("/").rpartition("/")[2]) as progress:
        folder = convert(
            options.source,
            options.destination,
            dtype=options.dtype,
            overwrite=options.overwrite,
            revision=options.revision,
            notice=lambda line: print(line, file=sys.stderr),
            progress=progress,
        )
    print(f"wrote {folder}", file=sys.stderr)
    return 0
