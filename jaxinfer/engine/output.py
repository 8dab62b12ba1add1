"""The output of one sequence: its text and counters as reports come, and the result at the end."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.decoding.batch import RowCounts
from jaxinfer.engine.programs import Report
from jaxinfer.engine.request import EngineRequest, RequestStats
from jaxinfer.results import GenerationResult, StreamPiece
from jaxinfer.text_generation import RowTimes, TextRow, add_details, finish_row


@dataclass
class SequenceOutput:
    """What a sequence has given so far; times are in seconds of the engine's clock.

    ``callback`` gets each piece in the engine's thread. ``compile_seconds`` tells what was spent compiling, where the
    clock leaves that out. ``decoded_from`` is when decoding began, where tokens do not come as they are drawn.
    """

    request: EngineRequest
    row: TextRow
    max_depth: int
    submitted: float
    callback: Callable[[StreamPiece], None] | None = None
    compile_seconds: Callable[[], float] = lambda: 0.0
    logprobs: list[float] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    started: float | None = None
    prefill_seconds: float = 0.0
    decoded_from: float | None = None
    _counters: dict[str, float] = field(default_factory=dict)
    _by_depth: np.ndarray | None = None

    def take(self, report: Report, index: int, is_last: bool, now: float) -> StreamPiece:
        """Add what a report has of row ``index``; return the text that is now certain."""
        count = int(report.counts_B[index])
        tokens, logprobs, from_draft = (
            array[index, :count].tolist() for array in (report.tokens_BE, report.logprobs_BE, report.from_draft_BE)
        )
        self.logprobs += logprobs
        self.from_draft += from_draft
        self.token_times += [now - self.submitted] * count
        for name in ("steps", "passes", "drafted", "accepted"):
            self._counters[name] = self._counters.get(name, 0) + getattr(report, f"{name}_B")[index]
        by_depth = report.accepted_by_depth_BM[index]
        self._by_depth = by_depth if self._by_depth is None else self._by_depth + by_depth
        return add_details(self.row.take(tokens, is_last), self.row, self.from_draft, self.logprobs)

    def take_whole(self, tokens: list[int], logprobs: list[float], steps: int, began: float, now: float) -> StreamPiece:
        """Add a whole text, which took so many steps since ``began``; return all of it."""
        self.logprobs, self.from_draft = logprobs, [False] * len(tokens)
        self.token_times = [now - self.submitted] * len(tokens)
        self.decoded_from = began - self.submitted
        self._counters = {"steps": steps, "passes": float(steps)}
        return add_details(self.row.take(tokens, True), self.row, self.from_draft, logprobs)

    def stats(self, cached_tokens: int = 0, preemptions: int = 0) -> RequestStats:
        """Return the times so far, of the tokens up to the end of a stop string; any thread may ask."""
        times = tuple(self.token_times[: len(self.row.tokens)])
        return RequestStats(
            prompt_tokens=len(self.row.request.request.prompt),
            queue_seconds=None if self.started is None else self.started - self.submitted,
            first_token_seconds=times[0] if times else None,
            token_seconds=times,
            cached_tokens=cached_tokens,
            preemptions=preemptions,
        )

    def result(self) -> GenerationResult:
        """Return the result of an output that has ended."""
        counters = self._counters
        by_depth = () if self._by_depth is None else tuple(self._by_depth.tolist())[: self.max_depth]
        counts = RowCounts(
            new_tokens=len(self.token_times),
            steps=int(counters.get("steps", 0)),
            target_passes=float(counters.get("passes", 0.0)),
            drafted=int(counters.get("drafted", 0)),
            accepted=int(counters.get("accepted", 0)),
            accepted_by_depth=by_depth,
        )
        began = self.token_times[0] if self.token_times and self.decoded_from is None else self.decoded_from or 0.0
        decode_seconds = self.token_times[-1] - began if self.token_times else 0.0
        times = RowTimes(self.prefill_seconds, decode_seconds, self.compile_seconds())
        return finish_row(self.row, counts, self.logprobs, self.from_draft, times)
