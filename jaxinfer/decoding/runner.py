"""What runs a batch of requests: the loop that the drafting strategies share, or one that a strategy has of its own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxinfer.decoding.batch import Request, RowCounts, RunningBatch
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.notation import Params

if TYPE_CHECKING:  # mctx is there for those who search
    from jaxinfer.decoding.search.batch import Value


@runtime_checkable
class Runner(Protocol):
    """A batch that has been prefilled; its rows are numbered as its requests are."""

    prefill_seconds: float
    decode_seconds: float
    prefill_bubble: float
    decode_bubble: float

    @property
    def compile_seconds(self) -> float:
        """The time that this batch has spent compiling; not part of the other times."""
        ...

    @property
    def done(self) -> bool:
        """Tell whether every row has finished."""
        ...

    def finished(self, row: int) -> bool:
        """Tell whether a row has finished."""
        ...

    def new_tokens(self) -> list[list[int]]:
        """Return, for each request, the tokens that came since the last call."""
        ...

    def advance(self, max_steps: int) -> None:
        """Run at most ``max_steps`` steps on the device."""
        ...

    def stop(self, rows: Sequence[int]) -> None:
        """End rows from outside: a stop string was found in their text."""
        ...

    def log_probabilities(self, row: int, num_tokens: int) -> list[float]:
        """Return the log-probabilities of a row's first ``num_tokens`` output tokens, if its request asks for them."""
        ...

    def from_draft(self, row: int) -> list[bool]:
        """Tell for each output token of a row so far whether a draft gave it, or else the target alone."""
        ...

    def counts(self, row: int) -> RowCounts:
        """Return a row's counters."""
        ...


def start_batch(
    programs: Programs,
    params: Params,
    strategy: Strategy,
    requests: Sequence[Request],
    eos_token_ids: Sequence[int],
    max_len: int,
    num_prompts: int | None = None,
    value: "Value | None" = None,
) -> Runner:
    """Prefill requests in the way that their strategy runs; what is missing to ``num_prompts`` is padded.

    Where results of a prompt come from rows of their own, each counts as a prompt. ``value`` is for tree search
    (`jaxinfer.decoding.search.batch`).
    """
    if strategy.exactness == "beam":
        # Imported here: other strategies need nothing of it.
        from jaxinfer.decoding.beam.batch import BeamBatch
        from jaxinfer.decoding.strategies.beam import BeamSearch

        if isinstance(strategy, BeamSearch):
            return BeamBatch(programs, params, strategy, requests, eos_token_ids, max_len, num_prompts)
    if strategy.exactness == "search":
        from jaxinfer.decoding.search.batch import SearchBatch
        from jaxinfer.decoding.strategies.mcts import TreeSearch

        if isinstance(strategy, TreeSearch):
            return SearchBatch(programs, params, strategy, requests, eos_token_ids, max_len, num_prompts, value)
    if strategy.drafts_elsewhere:
        from jaxinfer.decoding.ahead.batch import AheadBatch
        from jaxinfer.decoding.strategies.draft_model import DraftModel

        if isinstance(strategy, DraftModel):
            return AheadBatch(programs, params, strategy, requests, eos_token_ids, max_len, num_prompts)
    return RunningBatch(programs, params, strategy, requests, eos_token_ids, max_len, num_prompts)
