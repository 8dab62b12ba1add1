"""Rows of whole texts for training an EAGLE drafter, with the model's features if these are kept on disk."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from train.features.hidden_states import HiddenStates
from train.texts.packing import Example, fill_rows


class EagleRows(NamedTuple):
    """B rows of T tokens with several texts each; ``segments_BT`` numbers a row's texts, 0 is padding.

    Positions count from each text's own start; ``mask_BT`` marks the predicted tokens. ``hidden_BTF`` are the hidden
    states before several layers, side by side; None if the step is to compute them.
    """

    tokens_BT: Any
    positions_BT: Any
    segments_BT: Any
    mask_BT: Any
    hidden_BTF: Any = None


class RowSource:
    """Packs the examples ``texts`` into rows of ``length``; ``states`` are those of all examples' tokens, if any."""

    def __init__(
        self,
        examples: Sequence[Example],
        states: HiddenStates | None,
        texts: np.ndarray,
        length: int,
        seed: int,
    ) -> None:
        self._examples, self._length = examples, length
        self._hidden_PF = None if states is None else states.hidden_PD
        self._starts = np.concatenate([[0], np.cumsum([len(example.tokens) for example in examples])])
        # A shorter text has no token that a drafter could be asked for.
        texts = np.array([at for at in texts if any(examples[at].mask[2:])], np.int64)
        filled = fill_rows([len(examples[at].tokens) for at in texts], length, seed)
        self._rows = [[int(texts[at]) for at in row] for row in filled]

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def num_predicted(self) -> int:
        """The number of tokens that drafters are asked for."""
        return sum(sum(self._examples[at].mask[2:]) for row in self._rows for at in row)

    def take(self, rows: np.ndarray) -> EagleRows:
        """Return rows by their numbers; row -1 is all padding."""
        shape = (len(rows), self._length)
        tokens_BT, positions_BT, segments_BT = (np.zeros(shape, np.int32) for _ in range(3))
        mask_BT, hidden_BTF = np.zeros(shape, bool), None
        if self._hidden_PF is not None:
            hidden_BTF = np.zeros((*shape, self._hidden_PF.shape[1]), self._hidden_PF.dtype)
        for row, number in enumerate(rows):
            start = 0
            for segment, at in enumerate(self._rows[number] if number >= 0 else [], 1):
                example = self._examples[at]
                size = len(example.tokens)
                place = np.s_[row, start : start + size]
                tokens_BT[place], mask_BT[place], segments_BT[place] = example.tokens, example.mask, segment
                positions_BT[place] = np.arange(size)
                if hidden_BTF is not None and self._hidden_PF is not None:
                    hidden_BTF[place] = self._hidden_PF[self._starts[at] : self._starts[at + 1]]
                start += size
        return EagleRows(tokens_BT, positions_BT, segments_BT, mask_BT, hidden_BTF)
