"""Runs logged requests again by plain decoding, one at a time, and compares bits."""

import itertools
from dataclasses import dataclass, replace

from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.results import GenerationResult
from jaxinfer.server.fingerprint import system_fingerprint
from jaxinfer.server.log.entry import Entry, LoggedAnswer


@dataclass(frozen=True)
class Comparison:
    """How many answers of a request were compared, how many were equal, and how many were ended early.

    ``difference`` says where the first one differs, None if none does.
    """

    answers: int
    equal: int
    early: int
    difference: str | None


def check_replays(lm: LanguageModel, entry: Entry) -> None:
    """Raise InvalidOption if a model cannot give a request's answer: it is another, or has too little room."""
    if entry.adapter is not None and entry.adapter not in lm.adapters:
        raise InvalidOption(f"was answered with adapter {entry.adapter!r}: give --adapter {entry.adapter}=PATH")
    fingerprint = system_fingerprint(lm, entry.adapter)
    if entry.fingerprint != fingerprint:
        raise InvalidOption(f"was answered by {entry.fingerprint}, but this model is {fingerprint}")
    needed = max(len(prompt.ids) + prompt.max_new_tokens for prompt in entry.prompts)
    if needed > lm.max_len:
        raise InvalidOption(f"may need {needed} tokens, but the model was loaded with room for {lm.max_len}")


def replay(lm: LanguageModel, entry: Entry) -> Comparison:
    """Answer a request again, and compare."""
    compared: list[tuple[LoggedAnswer, str | None]] = []
    for index, prompt in enumerate(entry.prompts):
        logged = entry.answers_to(index)
        limit = prompt.max_new_tokens
        if not any(one.finish_reason for one in logged):
            # What nobody waited for might take long, and nothing of it is compared.
            limit = max(len(one.tokens) for one in logged)
        results: list[GenerationResult] = []
        if limit:
            sampling = replace(entry.sampling, logprobs=True)
            results = lm.generate(
                [prompt.ids], max_new_tokens=limit, sampling=sampling, batch_size=1, adapter=entry.adapter
            )
        for one, result in itertools.zip_longest(logged, results):
            compared.append((one, None if result is None else difference(one, result)))
    found = [(number, text) for number, (_, text) in enumerate(compared) if text is not None]
    return Comparison(
        answers=len(compared),
        equal=len(compared) - len(found),
        early=sum(one.finish_reason is None for one, _ in compared),
        difference=f"request {entry.id}, choice {found[0][0]}, {found[0][1]}" if found else None,
    )


def difference(logged: LoggedAnswer, found: GenerationResult) -> str | None:
    """Return where an answer differs from its log, None if it does not; one that was ended early has no more to say."""
    pairs = list(zip(logged.tokens, logged.logprobs, strict=True))
    again = list(zip(found.tokens, found.logprobs, strict=True))
    if logged.finish_reason is None:
        again = again[: len(pairs)]
    for place, (before, now) in enumerate(itertools.zip_longest(pairs, again)):
        if before is None or now is None or before[0] != now[0] or before[1].hex() != now[1].hex():
            return f"token {place}: the log has {_spelled(before)}, plain decoding {_spelled(now)}"
    if logged.finish_reason not in (None, found.finish_reason):
        return f"its end: the log has {logged.finish_reason}, plain decoding {found.finish_reason}"
    return None


def _spelled(token: tuple[int, float] | None) -> str:
    return "no token" if token is None else f"id {token[0]} with log-probability {token[1]!r}"
