"""Batches of text for training, and windows cut from one long text."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxinfer.notation import Array, Bool, Int


class Batch(NamedTuple):
    """Rows of tokens; ``mask_BT`` marks the predicted ones, each from the tokens before it in its text.

    A row is one text or, with ``segments_BT``, several: tokens of one number are one text. A text's first token has
    nothing before it and is never predicted, whatever its mask.
    """

    tokens_BT: Int[Array, "B T"] | Int[np.ndarray, "B T"]
    mask_BT: Bool[Array, "B T"] | Bool[np.ndarray, "B T"]
    segments_BT: Int[Array, "B T"] | Int[np.ndarray, "B T"] | None = None


def window_batches(
    token_ids: Sequence[int], *, num_rows: int, length: int, num_steps: int, seed: int
) -> Iterator[Batch]:
    """Yield ``num_steps`` batches of windows from anywhere in the text; they depend only on the seed."""
    ids = np.asarray(token_ids, np.int32)
    if len(ids) < length:
        raise ValueError(f"a text of {len(ids)} tokens holds no window of {length}: give more text or shorter windows")
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        starts_B1 = rng.integers(0, len(ids) - length + 1, (num_rows, 1))
        tokens_BT = ids[starts_B1 + np.arange(length)]
        yield Batch(tokens_BT, np.ones_like(tokens_BT, bool))
