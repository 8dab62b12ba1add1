"""The results of generation."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class GenerationStats:
    """Counters and times of one request.

    ``steps`` counts verifications by the target. ``target_passes`` counts every read of the target's blocks while
    decoding, drafting included, as layers read / layers. Times are in seconds, of the batch that the request ran in;
    where rows are refilled (`LanguageModel.generate`), of its own prompt, and from its first token to its last.
    ``tokens_per_second`` is this request's decoded tokens over the decoding time. On a mesh with pipeline stages,
    ``prefill_bubble`` and ``decode_bubble`` are the fraction of a pass in which a stage is idle: a pass over a prompt
    (or a chunk of it), and a pass that verifies. ``drafted_ahead`` of the steps verified drafts that a draft model on
    devices of its own had made while the step before was verified.
    """

    prompt_tokens: int
    new_tokens: int
    steps: int
    target_passes: float
    tokens_per_step: float
    drafted: int
    accepted: int
    accepted_by_depth: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    tokens_per_second: float
    seed: int
    prefill_bubble: float = 0.0
    decode_bubble: float = 0.0
    drafted_ahead: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """One output: ``tokens`` are the new tokens only, including the stop token.

    ``logprobs`` (log-softmax of the raw logits, one per token) is empty unless the sampling parameters ask for it.
    ``finish_reason`` is ``"stop"`` for a stop token or string and ``"length"`` for the token limit. ``from_draft``
    tells for each token whether it was accepted from a draft or is the target's own.
    """

    prompt: str | None
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    stats: GenerationStats
    sample: int = 0
    from_draft: tuple[bool, ...] = ()


@dataclass(frozen=True)
class StreamPiece:
    """A piece of a streamed output: whole characters only, and the tokens since the last piece.

    ``texts`` splits the text by token: each entry is the text that became certain with that token. The text of a token
    that ends amid a character, or where a stop string may have begun, comes with a later token. ``from_draft`` tells
    for each token whether it was accepted from a draft; ``logprobs`` has each token's if the request asks for them.
    ``result`` is set on the last piece. Of a request for several samples each has its own pieces, which name it by
    ``sample``.
    """

    text: str
    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    from_draft: tuple[bool, ...] = ()
    result: GenerationResult | None = field(default=None, repr=False)
    logprobs: tuple[float, ...] = ()
    sample: int = 0
