"""The fields that all ways to generate share: how tokens are drawn, how many, and in which order requests come."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.grammar.grammar import Grammar
from jaxinfer.results import StreamPiece
from jaxinfer.sampling.params import MAX_SEED, SamplingParams
from jaxinfer.server.api.errors import ApiError, wrong_field
from jaxinfer.server.api.fields import Fields, check_number, shown
from jaxinfer.server.api.grammars import take_grammar
from jaxinfer.server.api.tools import ToolUse

# Of one request: all samples of all of its prompts.
MOST_CHOICES = 128
_MOST_STOPS, _LONGEST_STOP = 16, 256
_MOST_BIASES = 300
_MOST_TOKENS = 2**30
_MOST_PRIORITY = 2**31 - 1
# A number that JavaScript can read back without rounding.
_SEED_BITS = 53


@dataclass(frozen=True)
class Limits:
    """What a model allows: its name, the ids that it has, the most tokens of prompt and output, its adapters' names."""

    model: str
    vocab_size: int
    longest_text: int
    adapters: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """What requests may name as their model."""
        return self.model, *self.adapters


@dataclass(frozen=True)
class Job:
    """A checked request: prompts of ids, and what is wanted of each.

    ``max_tokens`` is the most new tokens (None: as many as fit; 0: prompts are only scored). ``echoes`` are texts that
    come before the output of each prompt. ``top_logprobs`` is how many alternatives each token comes with. ``tools`` is
    what it may call. ``adapter`` is the loaded adapter that answers, None for the model itself. ``repeated`` are fields
    of the request that the answer repeats.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    max_tokens: int | None
    priority: int = 0
    cache_salt: str = ""
    drafts: bool = True
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    return_drafts: bool = False
    echoes: tuple[str, ...] = ()
    top_logprobs: int = 0
    tools: ToolUse | None = None
    adapter: str | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        """Whether more is told of tokens than drawing them does: alternatives, or how probable the prompt is."""
        return bool(self.top_logprobs or (self.echoes and self.sampling.logprobs))

    @property
    def tells_tokens(self) -> bool:
        """Whether more is asked for than text."""
        return self.sampling.logprobs or self.return_token_ids or self.return_drafts

    def shows(self, piece: StreamPiece) -> bool:
        """Tell whether a piece has anything that the request asks for."""
        return bool(piece.text or (piece.tokens and self.tells_tokens))

    def new_tokens(self, prompt: tuple[int, ...], longest_text: int) -> int:
        """Return how many tokens a prompt may get."""
        return longest_text - len(prompt) if self.max_tokens is None else self.max_tokens


def check_model(fields: Fields, limits: Limits) -> str | None:
    """Return the adapter that a request names as its model, None for the model itself; refuse all other names."""
    name = fields.required("model")
    if not isinstance(name, str):
        raise fields.wrong_type("model", name, "a string")
    if name not in limits.models:
        served = " or ".join(map(repr, limits.models))
        message = f"the model {shown(name)!r} is not served here: use {served}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return None if name == limits.model else name


def take_sampling(
    fields: Fields,
    limits: Limits,
    *,
    logprobs: bool,
    tools: ToolUse | None = None,
    take_grammar: Callable[[Fields], tuple[str, Grammar | None]] = take_grammar,
) -> SamplingParams:
    """Take the sampling parameters; without a seed one is drawn, and the answer names it.

    ``take_grammar`` takes the grammar of the text, and names its field.
    """
    top_k = fields.whole("top_k", 0, -1, 2**31 - 1) or 0
    seed = fields.whole("seed", None, 0, MAX_SEED)
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, is_open=True),
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_take_bias(fields, limits.vocab_size),
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        n=fields.whole("n", 1, 1, MOST_CHOICES) or 1,
        stop=_take_stop(fields),
        min_new_tokens=fields.whole("min_tokens", 0, 0, _MOST_TOKENS) or 0,
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        grammar=_checked_grammar(fields, *take_grammar(fields), tools),
    )


def _checked_grammar(fields: Fields, name: str, grammar: Grammar | None, tools: ToolUse | None) -> Grammar | None:
    """Return the grammar of an answer, which is that of its calls where it must call."""
    if tools is not None and grammar is not None:
        raise wrong_field(name, "does not go with tools: a text that follows it calls none")
    if tools is not None:
        grammar = tools.grammar
    for name in ("min_tokens", "ignore_eos"):
        if grammar is not None and fields.raw(name):
            raise wrong_field(name, "does not go with a grammar, which ends the text itself")
    return grammar


def take_delivery(fields: Fields) -> dict[str, Any]:
    """Take how the answer is to come, and in which order: arguments of `Job`."""
    stream = fields.flag("stream")
    include_usage = False
    options = fields.raw("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise fields.wrong_type("stream_options", options, "an object")
        if not stream:
            raise wrong_field("stream_options", "is for streams: set stream to true")
        inner = Fields(options, "stream_options.")
        include_usage = inner.flag("include_usage")
        inner.refuse("include_obfuscation", "streams are not padded", False)
        inner.end()
    strategy = fields.raw("strategy")
    if strategy not in (None, "on", "off"):
        raise wrong_field("strategy", f"{shown(strategy)} is neither on nor off")
    fields.text("user", longest=512)  # a label, which the answer does not depend on
    return {
        "stream": stream,
        "include_usage": include_usage,
        "return_token_ids": fields.flag("return_token_ids"),
        "return_drafts": fields.flag("return_drafts"),
        "priority": fields.whole("priority", 0, -_MOST_PRIORITY, _MOST_PRIORITY) or 0,
        "cache_salt": fields.text("cache_salt", longest=256),
        "drafts": strategy != "off",
    }


def take_max_tokens(fields: Fields, name: str, default: int | None, least: int = 1) -> int | None:
    """Take a bound on the number of new tokens."""
    return fields.whole(name, default, least, _MOST_TOKENS)


def check_job(job: Job, limits: Limits, param: str) -> Job:
    """Refuse prompts that leave no room for an answer, or for one as long as is asked for, and what no stream tells."""
    if job.stream and job.is_scored:
        message = "alternatives and log-probabilities of prompts come in whole answers alone: leave it out"
        raise wrong_field("stream", message, "unsupported_value")
    if len(job.prompts) * job.sampling.n > MOST_CHOICES:
        raise wrong_field(param, f"{len(job.prompts)} prompts with n={job.sampling.n} are over {MOST_CHOICES} choices")
    for prompt in job.prompts:
        wrong = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
        if wrong is not None:
            raise wrong_field(param, f"token id {shown(wrong)} is not in the vocabulary of {limits.vocab_size}")
        if len(prompt) + (1 if job.max_tokens is None else job.max_tokens) > limits.longest_text:
            asked = "" if job.max_tokens is None else f" and {job.max_tokens} are asked for"
            raise wrong_field(
                param,
                f"the prompt has {len(prompt)} tokens{asked}, but the context has room for {limits.longest_text} "
                "with the answer",
                "context_length_exceeded",
            )
    return job


def _take_bias(fields: Fields, vocab_size: int) -> Mapping[int, float]:
    given = fields.raw("logit_bias")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise fields.wrong_type("logit_bias", given, "an object of token ids and numbers")
    if len(given) > _MOST_BIASES:
        raise wrong_field("logit_bias", f"{len(given)} tokens are named, but at most {_MOST_BIASES} can be")
    biases = {}
    for text, value in given.items():
        is_id = text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < vocab_size
        if not is_id or int(text) in biases:
            problem = "is named twice" if is_id else f"is not a token id below {vocab_size}"
            raise wrong_field("logit_bias", f"{shown(text)!r} {problem}")
        biases[int(text)] = check_number(value, f"logit_bias.{text}", -100.0, 100.0)
    return biases


def _take_stop(fields: Fields) -> tuple[str, ...]:
    given = fields.raw("stop")
    if given is None:
        return ()
    strings = [given] if isinstance(given, str) else given
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise fields.wrong_type("stop", given, "a string or a list of strings")
    if len(strings) > _MOST_STOPS or not all(0 < len(one) <= _LONGEST_STOP for one in strings):
        raise wrong_field("stop", f"at most {_MOST_STOPS} strings are allowed, of 1 to {_LONGEST_STOP} characters each")
    return tuple(strings)
