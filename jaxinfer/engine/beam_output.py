"""The output of one beam search: its best texts, all of which come when the search has ended."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.decoding.beam.state import Ended
from jaxinfer.engine.output import SequenceOutput
from jaxinfer.engine.request import EngineRequest, RequestStats
from jaxinfer.results import StreamPiece
from jaxinfer.text_generation import TextRow


@dataclass
class BeamOutput:
    """What a search leads to: ``outputs`` of its best texts, best first.

    ``steps`` are those of the search so far; ``began`` is when it did, in seconds of the engine's clock.
    """

    outputs: list[SequenceOutput]
    steps: int = 0
    began: float = 0.0

    @property
    def request(self) -> EngineRequest:
        """Whom the texts are for."""
        return self.outputs[0].request

    @property
    def callback(self) -> None:
        """Nobody reads a search along: its texts are known when it ends."""

    @property
    def row(self) -> TextRow:
        """The best text."""
        return self.outputs[0].row

    @property
    def started(self) -> float | None:
        """When the prompt began to be computed."""
        return self.outputs[0].started

    @started.setter
    def started(self, now: float) -> None:
        for output in self.outputs:
            output.started = now

    @property
    def prefill_seconds(self) -> float:
        """How long computing the prompt has taken."""
        return self.outputs[0].prefill_seconds

    @prefill_seconds.setter
    def prefill_seconds(self, seconds: float) -> None:
        for output in self.outputs:
            output.prefill_seconds = seconds

    def stats(self, cached_tokens: int = 0, preemptions: int = 0) -> RequestStats:
        """Return the times of the best text so far."""
        return self.outputs[0].stats(cached_tokens, preemptions)

    def take(self, ended: Ended, prompt_length: int, now: float) -> list[StreamPiece]:
        """Take the texts of a search that has ended, of one row; return a piece of each, which is whole."""
        tokens_WS, logprobs_WS, lengths_W = (
            np.asarray(each)[0] for each in (ended.tokens_BWS, ended.logprobs_BWS, ended.lengths_BW)
        )

        def text(array_WS: Any, sample: int) -> list[Any]:
            return array_WS[sample, prompt_length : lengths_W[sample]].tolist()

        return [
            output.take_whole(text(tokens_WS, sample), text(logprobs_WS, sample), self.steps, self.began, now)
            for sample, output in enumerate(self.outputs)
        ]
