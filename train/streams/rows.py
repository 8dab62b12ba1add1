"""Rows of whole texts for training streams, and the tokens whose streams run in a step."""

from collections.abc import Sequence

import numpy as np

from train.features.hidden_states import HiddenStates
from train.streams.loss import StreamRows
from train.texts.packing import Example, fill_rows


class RowSource:
    """Packs texts into rows of ``length``; a batch runs the streams of ``num_picks`` tokens per row.

    A token can be picked if it predicts, and the next token does too: there decoding may draft. With ``to_the_end`` the
    token itself is enough, so that a base that learns too learns to end a text. ``states`` are the states of all
    examples' tokens before the layers with streams, None if they must be computed. Only the examples ``texts`` are
    packed. Everything depends only on the seed.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        states: HiddenStates | None,
        texts: np.ndarray,
        length: int,
        num_picks: int,
        seed: int,
        target_rows_V: np.ndarray,
        to_the_end: bool = False,
    ) -> None:
        self._to_the_end = to_the_end
        self._examples, self._length, self._num_picks, self._seed = examples, length, num_picks, seed
        self._hidden_PD = None if states is None else states.hidden_PD
        self._target_rows_V = target_rows_V
        self._starts = np.concatenate([[0], np.cumsum([len(example.tokens) for example in examples])])
        filled = fill_rows([len(examples[at].tokens) for at in texts], length, seed)
        rows = [[int(texts[at]) for at in row] for row in filled]
        # Texts of two tokens or fewer give a row nothing to learn.
        self._rows = [row for row in rows if len(self._eligible(row))]

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def num_candidates(self) -> int:
        """The number of tokens that can be picked."""
        return sum(len(self._eligible(row)) for row in self._rows)

    def sample(self, rows: np.ndarray, step: int) -> StreamRows:
        """Return rows by their numbers, with picks drawn for this step."""
        return self._take(rows, [self._shuffled(int(row), step + 1)[: self._num_picks] for row in rows])

    def parts(self, most: int | None = None) -> list[tuple[int, int]]:
        """Return arguments for `part` that together pick every token once; with ``most``, one part of so many rows.

        The latter are the same in every call.
        """
        if most is not None:
            return [(row, 0) for row in range(min(most, self.count))]
        sizes = [-(-len(self._eligible(row)) // self._num_picks) for row in self._rows]
        return [(row, part) for row, size in enumerate(sizes) for part in range(size)]

    def part(self, parts: Sequence[tuple[int, int]]) -> StreamRows:
        """Return rows with parts of their tokens picked; row -1 has no picks."""
        size = self._num_picks
        picks = [self._shuffled(row, 0)[part * size : (part + 1) * size] if row >= 0 else [] for row, part in parts]
        return self._take(np.maximum([row for row, _ in parts], 0), picks)

    def _shuffled(self, row: int, number: int) -> np.ndarray:
        eligible = self._eligible(self._rows[row])
        return np.random.default_rng((self._seed, row, number)).permutation(eligible)

    def _eligible(self, texts: Sequence[int]) -> np.ndarray:
        """Return the places in a row that can be picked."""
        found, start = [], 0
        for at in texts:
            mask = np.asarray(self._examples[at].mask)
            found.append(start + np.flatnonzero(mask[1:] if self._to_the_end else mask[1:-1] & mask[2:]))
            start += len(mask)
        return np.concatenate(found)

    def _take(self, rows: np.ndarray, picks: Sequence[Sequence[int] | np.ndarray]) -> StreamRows:
        shape = (len(rows), self._length)
        tokens_BT, positions_BT, segments_BT = (np.zeros(shape, np.int32) for _ in range(3))
        is_target_BT = np.zeros(shape, bool)
        hidden_BTD = None
        if self._hidden_PD is not None:
            hidden_BTD = np.zeros((*shape, self._hidden_PD.shape[1]), self._hidden_PD.dtype)
        picks_BP = np.full((len(rows), self._num_picks), -1, np.int32)
        for row, number in enumerate(rows):
            start = 0
            for segment, at in enumerate(self._rows[number], 1):
                example = self._examples[at]
                size = len(example.tokens)
                place = np.s_[row, start : start + size]
                tokens_BT[place], is_target_BT[place], segments_BT[place] = example.tokens, example.mask, segment
                positions_BT[place] = np.arange(size)
                if hidden_BTD is not None and self._hidden_PD is not None:
                    hidden_BTD[place] = self._hidden_PD[self._starts[at] : self._starts[at + 1]]
                start += size
            picks_BP[row, : len(picks[row])] = np.sort(np.asarray(picks[row], np.int32))
        targets_BT = self._target_rows_V[tokens_BT]
        return StreamRows(tokens_BT, positions_BT, segments_BT, is_target_BT, targets_BT, picks_BP, hidden_BTD)
