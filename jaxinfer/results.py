"""What generation returns."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class GenerationStats:
    """Counts and times of one prompt's generation.

    ``steps`` counts verifications by the target; ``target_passes`` every read of its blocks while decoding, drafting
    included, as layers read / layers. Times are of the batch that the prompt ran in, in seconds;
    ``tokens_per_second`` counts this prompt's decoded tokens over the decoding time. On a mesh whose axis ``pipeline``
    has stages, ``prefill_bubble`` and ``decode_bubble`` are the fraction of a pass in which a stage has nothing to do:
    of a pass over a prompt, or a chunk of it, and of one that verifies.
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


@dataclass(frozen=True)
class GenerationResult:
    """One generated text: ``tokens`` are the new ones only, the one that ended it included.

    ``logprobs`` (log-softmax of the raw logits, one a token) is empty unless the sampling parameters ask for it.
    ``finish_reason`` is ``"stop"`` for a stop token or string and ``"length"`` for the end of the room. ``from_draft``
    tells for each token whether it was accepted from a draft, or else is the target's own.
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
    """A piece of a streamed text: whole characters only, and the tokens that came since the last piece.

    ``texts`` is the text cut by these tokens: what became certain with each, which for a token that ends amid a
    character or where a stop string may have begun is said by a later one. ``from_draft`` tells for each whether it was
    accepted from a draft. ``result`` is set on the last piece.
    """

    text: str
    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    from_draft: tuple[bool, ...] = ()
    result: GenerationResult | None = field(default=None, repr=False)
