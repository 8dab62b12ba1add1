"""``jaxinfer replay``: runs the requests of a server's log again, and compares every bit."""

import argparse
import itertools
import sys
from pathlib import Path

from jaxinfer.cli.arguments import add_adapter_argument, add_model_arguments
from jaxinfer.cli.output.progress import count_progress
from jaxinfer.errors import InvalidOption

EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``replay``."""
    parser.add_argument("file", metavar="FILE", type=Path, help="what jaxinfer serve --log has written")
    add_model_arguments(parser)
    add_adapter_argument(parser, is_many=True)


def run(options: argparse.Namespace) -> int:
    """Compare all answers; return 0 where all are equal, else 1."""
    # Imported here: this waits for JAX.
    from jaxinfer.server.log.file import read_log

    # The whole file is read before anything runs: a mistake in its last line is told at once.
    num_entries = sum(1 for _ in read_log(options.file, lambda line: print(line, file=sys.stderr, flush=True)))
    if not num_entries:
        raise InvalidOption(f"{options.file}: holds no request")
    from jaxinfer.cli.loading import load_model
    from jaxinfer.server.log.replay import check_replays, replay

    lm = load_model(options)
    entries = lambda: itertools.islice(read_log(options.file, lambda line: None), num_entries)  # noqa: E731
    for number, entry in entries():
        try:
            check_replays(lm, entry)
        except InvalidOption as error:
            raise InvalidOption(f"{options.file}, line {number}: {error}") from None
    answers = equal = early = 0
    first = None
    with count_progress("replay", num_entries) as advance:
        for _, entry in entries():
            found = replay(lm, entry)
            answers, equal, early = answers + found.answers, equal + found.equal, early + found.early
            if first is None and found.difference is not None:
                first = found.difference + _excuse(entry.strategy)
            advance(entry.id)
    shortened = f"; {early} ended early, compared as far as they went" if early else ""
    print(f"{equal} of {answers} answers are equal in every bit{shortened}")
    if first is not None:
        print(f"the first difference: {first}")
    return 0 if first is None else EXIT_DIFFERENT


def _excuse(strategy: str) -> str:
    """Return what to know of a strategy that does not promise the tokens of plain decoding."""
    from jaxinfer.decoding.registry import parse_strategy

    try:
        exactness = parse_strategy(strategy).exactness
    except InvalidOption:  # another version's
        return ""
    return "" if exactness == "identical" else f" (the server ran {strategy}, whose promise is: {exactness})"
