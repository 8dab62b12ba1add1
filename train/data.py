"""Batches of text for training: windows cut from one long line of tokens; and ``python -m train.data distill``."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.notation import Array, Bool, Int


class Batch(NamedTuple):
    """Rows of tokens; ``mask_BT`` marks those that are predicted, each from the ones before it in its text.

    A row is one text or, where ``segments_BT`` is given, several: tokens of one number are one. A text's first token
    has nothing before it and is never predicted, whatever its mask.
    """

    tokens_BT: Int[Array, "B T"] | Int[np.ndarray, "B T"]
    mask_BT: Bool[Array, "B T"] | Bool[np.ndarray, "B T"]
    segments_BT: Int[Array, "B T"] | Int[np.ndarray, "B T"] | None = None


def window_batches(
    token_ids: Sequence[int], *, num_rows: int, length: int, num_steps: int, seed: int
) -> Iterator[Batch]:
    """Yield ``num_steps`` batches of windows that begin anywhere in the text; a function of the seed alone."""
    ids = np.asarray(token_ids, np.int32)
    if len(ids) < length:
        raise ValueError(f"a text of {len(ids)} tokens holds no window of {length}: give more text or shorter windows")
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        starts_B1 = rng.integers(0, len(ids) - length + 1, (num_rows, 1))
        tokens_BT = ids[starts_B1 + np.arange(length)]
        yield Batch(tokens_BT, np.ones_like(tokens_BT, bool))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``python -m train.data``."""
    from train import target_texts

    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    summary = "have a model answer prompts, to train drafters on; goes on where it was interrupted"
    distill = commands.add_parser("distill", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    target_texts.add_arguments(distill)
    distill.set_defaults(run=target_texts.run)


if __name__ == "__main__":
    from train.command import run_command

    sys.exit(run_command("data", "Make data for training.", add_arguments, lambda options: options.run(options)))
