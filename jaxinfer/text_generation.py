"""Runs one batch of requests and decodes its tokens to text as they arrive."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxinfer.decoding.batch import Request, RowCounts
from jaxinfer.decoding.runner import Runner
from jaxinfer.results import GenerationResult, GenerationStats, StreamPiece
from jaxinfer.tokenizers import TextStream, Tokenizer

Run = Generator[list[StreamPiece], None, list[GenerationResult]]

# Steps that the device runs before the host reads the output: few while someone waits for text, and never so many that
# an interrupt from the keyboard would wait long.
_FIRST_LOOKS = (1, 2, 4)
_STEPS_WATCHED = 8
_STEPS_UNWATCHED = 32


@dataclass(frozen=True)
class TextRequest:
    """A request and its prompt's text, None if the prompt came as token ids."""

    text: str | None
    request: Request


@dataclass
class TextRow:
    """The output of one row so far; ``stream`` is None without a tokenizer."""

    request: TextRequest
    stop_ids: frozenset[int]
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    num_told: int = 0
    is_cut: bool = False
    is_over: bool = False
    _texts: list[str] = field(default_factory=list)

    def take(self, new_tokens: list[int], is_last: bool) -> StreamPiece:
        """Add tokens; return the text that is now certain, and the tokens up to the end of a stop string.

        Tokens that a stop string may yet cut off are not told before they are read: pieces have the tokens of the
        result, however they are cut.
        """
        if self.is_over:
            return StreamPiece("")
        self.is_over = is_last
        self.tokens += new_tokens
        if self.stream is None:
            self.num_told = len(self.tokens)
            return StreamPiece("", tuple(new_tokens))
        texts = [self.stream.push([token]) for token in (new_tokens[:-1] if self.ends_by_token else new_tokens)]
        texts += [""] * (len(new_tokens) - len(texts))
        text = "".join(texts)
        self._texts += texts
        if is_last:
            rest = self.stream.finish()
            text += rest
            if self._texts:
                self._texts[-1] += rest
        if self.stream.stopped:
            self.is_cut = self.is_over = True
            del self.tokens[(self.stream.stop_token_index or 0) + 1 :]
        waiting = self.stream.num_unread if self.request.request.sampling.stop and not self.is_over else 0
        start, self.num_told = self.num_told, len(self.tokens) - waiting
        count = self.num_told - start
        told, later = self._texts[:count], self._texts[count:]
        self._texts = later if waiting else []
        if told and not waiting:  # text that a token after the stop string's end has released
            told[-1] += "".join(later)
        return StreamPiece(text, tuple(self.tokens[start : self.num_told]), tuple(told))

    @property
    def ends_by_token(self) -> bool:
        """Whether the last token is one that ends a text."""
        return bool(self.tokens) and self.tokens[-1] in self.stop_ids


def count_rows(requests: Sequence[TextRequest], rows_per_prompt: int | None) -> int:
    """Return how many rows requests take in all, where the results of a prompt share so many (None: none do)."""
    if rows_per_prompt is None:
        return len(requests)
    return sum(one.request.sample == 0 for one in requests) * rows_per_prompt


def cut_batches(
    requests: Sequence[TextRequest], rows_per_prompt: int | None, batch_size: int
) -> Iterator[tuple[list[TextRequest], int]]:
    """Split requests into batches of at most ``batch_size`` rows; a prompt that needs more rows gets its own batch.

    Each batch comes with its padded number of prompts (of requests, if results do not share rows). All batches have the
    same one, so that all run the same programs.
    """
    starts = [at for at, one in enumerate(requests) if rows_per_prompt is None or one.request.sample == 0]
    size = min(max(1, batch_size // (rows_per_prompt or 1)), len(starts))
    for first in range(0, len(starts), size or 1):
        end = starts[first + size] if first + size < len(starts) else len(requests)
        yield list(requests[starts[first] : end]), size


def run_requests(
    requests: Sequence[TextRequest],
    batch: Runner,
    stop_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    learn: Callable[[Sequence[int]], None] = lambda answer: None,
    *,
    is_watched: bool,
) -> Run:
    """Decode a prefilled batch to its end; yield each row's new text and tokens at every update, return the results.

    ``is_watched`` updates often, for a reader who waits; so do stop strings. ``learn`` gets each row's tokens.
    """
    rows = [start_row(request, stop_token_ids, tokenizer) for request in requests]
    looks_often = is_watched or any(row.request.request.sampling.stop for row in rows)
    looks = iter(_FIRST_LOOKS)
    while True:
        news = batch.new_tokens()
        pieces = [row.take(tokens, batch.finished(index)) for index, (row, tokens) in enumerate(zip(rows, news))]
        batch.stop([index for index, row in enumerate(rows) if row.is_cut and not batch.finished(index)])
        yield (
            [_add_details(piece, row, index, batch) for index, (row, piece) in enumerate(zip(rows, pieces))]
            if is_watched
            else pieces
        )
        if batch.done:
            break
        batch.advance(next(looks, _STEPS_WATCHED) if looks_often else _STEPS_UNWATCHED)
    for row in rows:
        learn(row.tokens)
    return [_finish_row(row, index, batch) for index, row in enumerate(rows)]


def _add_details(piece: StreamPiece, row: TextRow, index: int, batch: Runner) -> StreamPiece:
    """Mark which of a piece's tokens were accepted from drafts, and add their log-probabilities if they are wanted."""
    wants_logprobs = row.request.request.sampling.logprobs
    logprobs = batch.log_probabilities(index, len(row.tokens)) if wants_logprobs else []
    return add_details(piece, row, batch.from_draft(index), logprobs)


def add_details(piece: StreamPiece, row: TextRow, from_draft: Sequence[bool], logprobs: Sequence[float]) -> StreamPiece:
    """Add what is known of a piece's tokens, the last that the row has told; lists are of the row's, and may go on.

    ``logprobs`` is looked at only if the request asks for them.
    """
    request, end = row.request.request, row.num_told
    start = end - len(piece.tokens)
    return replace(
        piece,
        from_draft=tuple(from_draft[start:end]),
        logprobs=tuple(logprobs[start:end]) if request.sampling.logprobs else (),
        sample=request.sample,
    )


def start_row(request: TextRequest, stop_token_ids: Sequence[int], tokenizer: Tokenizer | None) -> TextRow:
    """Return the output of a request that has none yet."""
    params = request.request.sampling
    stream = None if tokenizer is None else TextStream(tokenizer, request.request.prompt, params.stop)
    return TextRow(request, frozenset() if params.ignore_eos else frozenset(stop_token_ids), stream)


def _finish_row(row: TextRow, index: int, batch: Runner) -> GenerationResult:
    times = RowTimes(
        batch.prefill_seconds, batch.decode_seconds, batch.compile_seconds, batch.prefill_bubble, batch.decode_bubble
    )
    wants_logprobs = row.request.request.sampling.logprobs
    logprobs = batch.log_probabilities(index, len(row.tokens)) if wants_logprobs else []
    return finish_row(row, batch.counts(index), logprobs, batch.from_draft(index), times)


class RowTimes(NamedTuple):
    """Where the time of a row's batch went, in seconds, and the bubbles of a pipeline; see `GenerationStats`."""

    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    prefill_bubble: float = 0.0
    decode_bubble: float = 0.0


def finish_row(
    row: TextRow, counts: RowCounts, logprobs: Sequence[float], from_draft: Sequence[bool], times: RowTimes
) -> GenerationResult:
    """Return the result of an output that has ended; lists may go on past its last token."""
    request, num_tokens = row.request.request, len(row.tokens)
    # Prefill draws the first token, if it draws any; steps draw the others, including those past a stop string.
    by_steps, decoded = (count - counts.first_tokens for count in (counts.new_tokens, num_tokens))
    return GenerationResult(
        prompt=row.request.text,
        text="" if row.stream is None else row.stream.text,
        tokens=tuple(row.tokens),
        logprobs=tuple(logprobs[:num_tokens]) if request.sampling.logprobs else (),
        finish_reason="stop" if row.is_cut or row.ends_by_token else "length",
        sample=request.sample,
        from_draft=tuple(from_draft[:num_tokens]),
        stats=GenerationStats(
            prompt_tokens=len(request.prompt),
            new_tokens=num_tokens,
            steps=counts.steps,
            target_passes=counts.target_passes,
            tokens_per_step=by_steps / counts.steps if counts.steps else 0.0,
            drafted=counts.drafted,
            accepted=counts.accepted,
            accepted_by_depth=counts.accepted_by_depth,
            drafted_ahead=counts.drafted_ahead,
            tokens_per_second=decoded / times.decode_seconds if times.decode_seconds else 0.0,
            seed=request.sampling.seed,
            **times._asdict(),
        ),
    )


def exhaust(run: Run) -> list[GenerationResult]:
    """Return the results of a batch, whose pieces nobody watches."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def stream_pieces(run: Run) -> Iterator[StreamPiece]:
    """Yield the pieces of a batch of one; the last one carries its result."""
    while True:
        try:
            (piece,) = next(run)
        except StopIteration as end:
            yield StreamPiece("", result=end.value[0])
            return
        yield piece
