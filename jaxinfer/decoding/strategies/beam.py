"""Beam search: keep the most probable texts instead of drawing one, as Hugging Face transformers does."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategy import Target
from jaxinfer.errors import InvalidOption
from jaxinfer.sampling.params import SamplingParams

_MOST_BEAMS = 1024


@dataclass(frozen=True)
class BeamSearch(Autoregressive):
    """Let ``width`` texts run side by side, each a token a step, and return the ``n`` best of those that ended.

    A text that ended scores its log-probability / length ** ``length_penalty``, counting its new tokens. With
    ``early_stopping`` a search ends as soon as ``width`` texts have; with False when its best running text would score
    less than all of them if it ended now; with "never" when it could not reach them at any length. One beam is greedy
    search. Which texts run on is decided by a loop of its own (`jaxinfer.decoding.beam.batch`).
    """

    name: ClassVar[str] = "beam"
    description: ClassVar[str] = "keep the most probable texts; equals transformers' beam search, draws nothing"
    needs_dense_cache: ClassVar[bool] = True

    width: int = 4
    length_penalty: float = 1.0
    early_stopping: Literal[True, False, "never"] = False
    n: int = 1

    def __post_init__(self) -> None:
        check_range(self, "width", 1, _MOST_BEAMS)
        check_range(self, "length_penalty", -100, 100)
        check_choice(self, "early_stopping", (True, False, "never"))
        check_range(self, "n", 1, _MOST_BEAMS)
        self._check_results(self.n)

    @property
    def exactness(self) -> str:
        return "beam"

    @property
    def rows_per_prompt(self) -> int:
        return self.width

    def num_results(self, sampling: SamplingParams) -> int:
        if sampling.temperature != 0:
            raise InvalidOption(
                f"beam: temperature={sampling.temperature:g} is not 0: a search keeps the most probable texts and "
                "draws none"
            )
        if sampling.stop:
            raise InvalidOption("beam: a search ends its texts at stop tokens and cannot look for stop strings")
        if 1 not in (self.n, sampling.n) and self.n != sampling.n:
            raise InvalidOption(f"beam: n is {self.n} in the strategy and {sampling.n} in sampling: give one of them")
        self._check_results(sampling.n)
        return max(self.n, sampling.n)

    def resolve(self, target: Target) -> "BeamSearch":
        vocab_size = target.config.vocab_size
        if self.width > vocab_size:
            raise InvalidOption(f"beam: width={self.width} is more than the {vocab_size} tokens of the vocabulary")
        return self

    def _check_results(self, count: int) -> None:
        if count > self.width:
            raise InvalidOption(f"beam: n={count} results are more than the width={self.width} texts of a search")
