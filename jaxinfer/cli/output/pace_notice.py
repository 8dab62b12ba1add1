"""Says how fast a strategy ran beside plain decoding on the same device, and that it was slower where it was."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.language_model import LanguageModel
    from jaxinfer.results import GenerationResult
    from jaxinfer.sampling.params import SamplingParams


def pace_lines(
    model: "LanguageModel",
    strategy: str,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[Sequence["GenerationResult"]],
    max_new_tokens: int,
    sampling: "SamplingParams",
    adapter: str | None = None,
) -> list[str]:
    """Run a few plain steps after the rows of the first batch, ``prompts``, and return what that says of all batches.

    Nothing is said of plain decoding itself, of a search, which is no way to decode faster, and of too short texts.
    """
    # Imported here: only --stats asks for it.
    from jaxinfer.bench.plain_pace import TIMED_STEPS, plain_step_seconds, speed_up
    from jaxinfer.decoding.registry import parse_strategy

    parsed = parse_strategy(strategy)
    if parsed.name == "autoregressive" or parsed.is_search:
        return []
    step_seconds = plain_step_seconds(model, prompts, max_new_tokens, sampling, adapter)
    ratio = None if step_seconds is None else speed_up(batches, step_seconds)
    if step_seconds is None or ratio is None:
        return []
    lines = [f"against plain decoding: {ratio:.2f}x (of {1 / step_seconds:.1f} steps/s, measured over {TIMED_STEPS})"]
    if ratio < 1:
        lines.append(f"slower: on this device plain decoding would have been faster than {parsed.name}")
    return lines
