"""Rows of whole texts, some for training and some held out."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.errors import InvalidOption
from train.texts.batches import Batch
from train.texts.packing import Example, pack

_DEFAULT_LENGTH = 512


class TextRows(NamedTuple):
    """Texts packed into rows; ``prompts`` are the starts of the training texts."""

    trained: Batch
    held_out: Batch
    prompts: Sequence[tuple[int, ...]]

    @property
    def num_predicted(self) -> int:
        """The number of predicted tokens in the training texts."""
        return int(np.sum(self.trained.mask_BT))


def split_texts(num_texts: int, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training texts and of the held-out ones, at least one of each."""
    shuffled = np.random.default_rng(seed).permutation(num_texts)
    num_held_out = max(1, round(held_out * num_texts))
    if num_held_out >= num_texts:
        raise InvalidOption(f"{num_texts} texts leave none to train on: give more, or a smaller --held-out")
    return shuffled[num_held_out:], shuffled[:num_held_out]


def row_length(options: argparse.Namespace, context: int) -> int:
    """Return the length of rows: ``--length``, by default 512, at most the model's context."""
    return min(options.length or _DEFAULT_LENGTH, context)


def pack_texts(examples: Sequence[Example], length: int, held_out: float, seed: int) -> TextRows:
    """Split texts and pack both parts."""
    trained, apart = split_texts(len(examples), held_out, seed)
    rows = pack([examples[at] for at in trained], length, seed)
    return TextRows(rows, pack([examples[at] for at in apart], length, seed), _prompts(examples, trained))


def _prompts(examples: Sequence[Example], chosen: np.ndarray, most: int = 8) -> list[tuple[int, ...]]:
    """Return the tokens before the answers; for texts that are predicted as a whole, the first few tokens."""
    prompts = []
    for tokens, mask in (examples[at] for at in chosen):
        first = mask.index(True) if any(mask) else len(tokens) - 1
        prompts.append(tokens[: first if first > 0 else max(1, min(most, len(tokens) // 2))])
    return prompts


def take_rows(rows: Any, places: np.ndarray) -> Any:
    """Return some rows of a batch."""
    return jax.tree.map(lambda leaf: leaf[places], rows)


def batches_of(rows: Batch, size: int = 8) -> Iterator[Batch]:
    """Yield all rows in batches of one shape; the last is filled with rows that predict nothing."""
    count = len(rows.tokens_BT)
    size = min(size, count)
    for start in range(0, count, size):
        places = np.arange(start, start + size)
        batch = take_rows(rows, places % count)
        yield batch._replace(mask_BT=np.asarray(batch.mask_BT) & (places < count)[:, None])
