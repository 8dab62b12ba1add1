"""Packs texts of any length into rows of one length, and makes batches that depend only on the seed and the step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from train.texts.batches import Batch


class Example(NamedTuple):
    """A text as token ids; ``mask`` marks the predicted ones."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


def pack(examples: Sequence[Example], length: int, seed: int, *, open_rows: int = 32) -> Batch:
    """Pack whole texts into rows of ``length``, shuffled by the seed; no text is cut.

    The rest of a row is padding: its segment is 0 and none of it is predicted.
    """
    rows = fill_rows([len(example.tokens) for example in examples], length, seed, open_rows=open_rows)
    tokens_BT = np.zeros((len(rows), length), np.int32)
    mask_BT, segments_BT = np.zeros_like(tokens_BT, bool), np.zeros_like(tokens_BT)
    for row, texts in enumerate(rows):
        start = 0
        for segment, text in enumerate((examples[at] for at in texts), 1):
            place = np.s_[row, start : start + len(text.tokens)]
            tokens_BT[place], mask_BT[place], segments_BT[place] = text.tokens, text.mask, segment
            start += len(text.tokens)
    return Batch(tokens_BT, mask_BT, segments_BT)


def fill_rows(sizes: Sequence[int], length: int, seed: int, *, open_rows: int = 32) -> list[list[int]]:
    """Return the texts in each row of ``length``, for texts of these sizes, shuffled by the seed.

    Each goes into the first row with room among the last ``open_rows``.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []
    for at in np.random.default_rng(seed).permutation(len(sizes)):
        size = sizes[at]
        if size > length:
            raise ValueError(f"a text of {size} tokens does not fit into rows of {length}")
        first = max(0, len(rows) - open_rows)
        place = next((row for row in range(first, len(rows)) if rooms[row] >= size), len(rows))
        if place == len(rows):
            rows.append([])
            rooms.append(length)
        rows[place].append(int(at))
        rooms[place] -= size
    return rows


def split_batch(batch: Any, parts: int) -> Any:
    """Split a batch into microbatches, a new first axis."""
    return jax.tree.map(lambda array: array.reshape(parts, -1, *array.shape[1:]), batch)


class Order:
    """The items, of ``count``, in each step's batch: shuffled every epoch, none left out, no duplicates in a batch.

    They depend only on the seed and the step, so a resumed run gets the same batches.
    """

    def __init__(self, count: int, per_step: int, seed: int) -> None:
        self._count, self._per_step, self._seed = count, per_step, seed
        self._epoch, self._shuffled = -1, np.zeros(0, np.int64)

    @property
    def steps_per_epoch(self) -> float:
        """The number of steps that use every item once."""
        return self._count / self._per_step

    def at(self, step: int) -> np.ndarray:
        """Return the indices of a step's items."""
        places = step * self._per_step + np.arange(self._per_step)
        return np.array([self._shuffle(int(place // self._count))[place % self._count] for place in places])

    def _shuffle(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng((self._seed, epoch)).permutation(self._count)
        return self._shuffled
