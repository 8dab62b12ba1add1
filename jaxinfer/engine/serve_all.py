"""Runs a list of requests on the engine's scheduler, in the caller's thread: a row that ends is refilled."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from jaxinfer.cache.layouts import PagedLayout
from jaxinfer.decoding.batch import cache_bucket
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.arrivals import sequences_of
from jaxinfer.engine.assembly import make_core
from jaxinfer.engine.config import Drafting, EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.kept_pace import KeptPace
from jaxinfer.engine.request import EngineRequest
from jaxinfer.engine.sequence import EngineSequence
from jaxinfer.notation import Params
from jaxinfer.results import GenerationResult, StreamPiece
from jaxinfer.text_generation import TextRequest
from jaxinfer.tokenizers import Tokenizer


def serve_all(
    programs: Programs,
    params: Params,
    strategy: Strategy,
    requests: Sequence[TextRequest],
    *,
    num_rows: int,
    max_len: int,
    eos_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    kept_pace: KeptPace,
) -> Iterator[list[GenerationResult]]:
    """Yield the requests' results in their order, each list as soon as its first one is there; no list is empty.

    ``programs`` have a paged cache, ``num_rows`` requests decode together, and no text is longer than ``max_len``.
    """
    longest = max(request.request.max_length for request in requests)
    # Of a few lengths, so that calls share their programs.
    bucket = min(cache_bucket(longest, 0, max_len), max_len)
    assert isinstance(programs.layout, PagedLayout)
    page_size = programs.layout.page
    headroom = step_headroom(strategy, programs.decoder.backend)
    config = EngineConfig(
        max_rows=num_rows,
        page_size=page_size,
        # Nobody makes room: every row has the pages of the longest text.
        pages=max(2, num_rows * -(-(bucket + headroom) // page_size)),
        max_batch_prefill_tokens=num_rows * bucket,
        max_waiting=len(requests),
        drafting=drafting_of(strategy),
    )
    compiled_before = programs.compile_seconds

    def compile_seconds() -> float:
        return programs.compile_seconds - compiled_before

    core = make_core(
        programs,
        params,
        strategy,
        config,
        max_len=bucket,
        eos_token_ids=eos_token_ids,
        # Compiling is no part of a request's times.
        clock=lambda: time.perf_counter() - programs.waited_seconds,
        rounds_up=True,
        kept_pace=kept_pace,
    )
    handles = add_requests(
        core,
        requests,
        strategy,
        itertools.count(),
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
        now=0.0,
        compile_seconds=compile_seconds,
    )
    try:
        told = 0
        while told < len(handles):
            while not handles[told].done:
                core.step()
            ready = told
            while ready < len(handles) and handles[ready].done:
                ready += 1
            yield [result for handle in handles[told:ready] for result in handle.results(0.0)]
            told = ready
    finally:
        core.drop_device()


def drafting_of(strategy: Strategy) -> Drafting:
    """Return how a call drafts: it does what it was asked for, and counts it, unless that is left open."""
    return "auto" if strategy.adapts else "always"


def add_requests(
    core: EngineCore,
    requests: Sequence[TextRequest],
    strategy: Strategy,
    numbers: Iterator[int],
    *,
    eos_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    now: float,
    compile_seconds: Callable[[], float],
    callback: Callable[[StreamPiece], None] | None = None,
    into: list[EngineSequence] | None = None,
) -> list[EngineRequest]:
    """Let requests wait in a core; return what each prompt's results come to.

    ``into`` gets their sequences.
    """
    handles: list[EngineRequest] = []
    starts = [at for at, request in enumerate(requests) if request.request.sample == 0]
    for start, end in zip(starts, [*starts[1:], len(requests)]):
        texts = requests[start:end]
        handles.append(EngineRequest(len(texts), len(texts[0].request.prompt), lambda handle: None))
        sequences = sequences_of(
            strategy,
            texts,
            handles[-1],
            numbers,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            now=now,
            callback=callback,
            compile_seconds=compile_seconds,
        )
        if into is not None:
            into += sequences
        for sequence in sequences:
            core.add(sequence)
    return handles
