"""Checks what callers ask for and makes requests of it: one a prompt and sample."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.errors import InvalidOption
from jaxinfer.model_checks import check_grammar, check_ids
from jaxinfer.sampling.arrays import check_bias
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text_generation import TextRequest


def listed(prompts: object) -> list[Any]:
    """Return prompts as a list; a text alone is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidOption(f"prompts {prompts!r} are neither a text nor a list of texts or of token ids")
    return list(prompts)


def check_new_tokens(max_new_tokens: object) -> int:
    """Return a number of new tokens; raise InvalidOption for what is none."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InvalidOption(f"max_new_tokens {max_new_tokens!r} is not a whole number of 1 or more")
    return max_new_tokens


def sampling_of_each(sampling: object, num_prompts: int) -> list[SamplingParams]:
    """Return each prompt's sampling, given one for all or one for each; None is greedy."""
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or SamplingParams()] * num_prompts
    if not isinstance(sampling, Sequence) or not all(isinstance(params, SamplingParams) for params in sampling):
        raise InvalidOption(f"sampling is SamplingParams, one or a sequence of them, not {sampling!r:.80}")
    if len(sampling) != num_prompts:
        raise InvalidOption(
            f"{len(sampling)} sampling parameters for {num_prompts} prompts: give one, or one for each prompt"
        )
    return list(sampling)


def text_requests(
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    sampling: Sequence[SamplingParams],
    strategy: Strategy,
    *,
    encode: Callable[[str], Sequence[int]],
    vocab_size: int,
    max_len: int,
    can_grow: bool,
    adapters: Sequence[int] | None = None,
) -> list[TextRequest]:
    """Return the requests for texts or ids; raise InvalidOption for what does not fit.

    ``max_len`` bounds prompt and output; if it ``can_grow``, the error says so. ``adapters`` are the numbers of the
    prompts' loaded adapters; None is none.
    """
    requests: list[TextRequest] = []
    for prompt, params, adapter in zip(prompts, sampling, adapters or [0] * len(prompts), strict=True):
        ids = check_ids(encode(prompt) if isinstance(prompt, str) else prompt, vocab_size)
        if len(ids) >= max_len:
            mend = "shorten it or raise max_len" if can_grow else "shorten it"
            raise InvalidOption(
                f"the prompt has {len(ids)} tokens, but the context has room for {max_len} with the answer: {mend}"
            )
        max_length = min(len(ids) + max_new_tokens, max_len)
        text = prompt if isinstance(prompt, str) else None
        samples = range(strategy.num_results(params))
        check_grammar(params, strategy)
        check_bias(params, vocab_size)
        requests += [TextRequest(text, Request(ids, max_length, params, sample, adapter)) for sample in samples]
    return requests


def is_next_turn(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a conversation goes on: an answer of its assistant is part of it."""
    return any(isinstance(message, Mapping) and message.get("role") == "assistant" for message in messages)
