"""``/v1/completions``: what its requests may say, and the form of its answers."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.results import StreamPiece
from jaxinfer.server.api.alternatives import by_text
from jaxinfer.server.api.choices import Choice, Head, told_of_tokens
from jaxinfer.server.api.errors import ApiError, wrong_field
from jaxinfer.server.api.fields import Fields, is_ids
from jaxinfer.server.api.sampling import (
    Job,
    Limits,
    check_job,
    check_model,
    take_delivery,
    take_max_tokens,
    take_sampling,
)
from jaxinfer.tokenizers import Tokenizer

_MAX_TOKENS = 16
_MOST_ALTERNATIVES = 5


def read_completion(body: Mapping[str, Any], limits: Limits, tokenizer: Tokenizer) -> Job:
    """Check a request and return what it asks for."""
    fields = Fields(body)
    adapter = check_model(fields, limits)
    prompt = fields.required("prompt")
    logprobs = fields.whole("logprobs", None, 0, _MOST_ALTERNATIVES)
    sampling = take_sampling(fields, limits, logprobs=logprobs is not None)
    echo = fields.flag("echo")
    max_tokens = take_max_tokens(fields, "max_tokens", _MAX_TOKENS, 0)
    if max_tokens == 0 and not echo:
        raise wrong_field("max_tokens", "leaves nothing to answer: set echo to true, or ask for 1 or more")
    delivery = take_delivery(fields)
    fields.refuse("best_of", "answers are not ranked: use n", 1, sampling.n)
    fields.refuse("suffix", "text is not inserted before a suffix", "")
    fields.end()
    prompts = read_prompts(prompt, "prompt")
    ids = tuple(tuple(tokenizer.encode(one) if isinstance(one, str) else one) for one in prompts)
    if not all(ids):
        raise wrong_field("prompt", "has no token")
    echoes = tuple(_text_of(one, limits, tokenizer) for one in prompts) if echo else ()
    job = Job(ids, sampling, max_tokens, **delivery, echoes=echoes, top_logprobs=logprobs or 0, adapter=adapter)
    return check_job(job, limits, "prompt")


def _text_of(prompt: Any, limits: Limits, tokenizer: Tokenizer) -> str:
    """Return a prompt's text; ids that are not the model's, which `check_job` refuses, have none."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode([one for one in prompt if 0 <= one < limits.vocab_size])


def read_prompts(prompt: Any, name: str) -> Sequence[Any]:
    """Return the texts of a field, each a text or a list of ids: they come alone or in a list."""
    if isinstance(prompt, str) or is_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or is_ids(one) for one in prompt):
        return prompt
    wanted = "a text, a list of token ids, or a list of either"
    raise wrong_field(name, f"is not {wanted}", "invalid_type")


class CompletionForm:
    """The JSON of answers to a completion request."""

    is_typed = False

    def __init__(self, head: Head, job: Job) -> None:
        self._head, self._job = head, job

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return an answer that comes at once."""
        made = []
        for choice in choices:
            one = self._choice(choice, 0, choice.echo + choice.text, choice.finish_reason)
            made.append(one | self._prompt_ids(choice))
        return self._head.stamp("text_completion", made, {"usage": usage})

    def first(self, choices: Sequence[Choice]) -> Iterable[dict[str, Any]]:
        """Yield a chunk of each choice's prompt, where anything is to be said of it."""
        for choice in choices:
            prompt_ids = self._prompt_ids(choice)
            if choice.echo or prompt_ids:
                yield self._chunk(self._choice(choice, None, choice.echo, None) | prompt_ids)

    def delta(self, choice: Choice, start: int, piece: StreamPiece) -> Iterable[dict[str, Any]]:
        """Yield the chunk of a choice's tokens from ``start`` on."""
        if self._job.shows(piece):
            yield self._chunk(self._choice(choice, start, piece.text, None))

    def last(self, choice: Choice) -> Iterable[dict[str, Any]]:
        """Yield the chunk that ends a choice."""
        yield self._chunk(self._choice(choice, None, "", choice.finish_reason))

    def end(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        """Yield the chunk of the usage, if it is asked for."""
        if self._job.include_usage:
            yield self._head.stamp("text_completion", [], {"usage": usage})

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the error."""
        return error.body

    def _chunk(self, one: dict[str, Any]) -> dict[str, Any]:
        return self._head.stamp("text_completion", [one], {"usage": None} if self._job.include_usage else {})

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": list(choice.prompt)} if self._job.return_token_ids else {}

    def _choice(self, choice: Choice, start: int | None, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Return a choice with its tokens from ``start`` on (None: without any)."""
        logprobs = None
        if self._job.sampling.logprobs and start is not None:
            logprobs = self._logprobs(choice, start)
        made = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if start is not None:
            made |= told_of_tokens(choice, start, ids=self._job.return_token_ids, drafts=self._job.return_drafts)
        return made

    def _logprobs(self, choice: Choice, start: int) -> dict[str, Any]:
        """Return what is told of tokens from ``start`` on; the prompt's come first, if they are part of the answer."""
        if not self._job.is_scored:
            return {
                "tokens": choice.texts[start:],
                "token_logprobs": choice.logprobs[start:],
                "top_logprobs": None,
                "text_offset": choice.offsets(start),
            }
        scored = choice.scored
        prompt = choice.prompt[: len(scored.prompt_texts)]
        tokens, texts = [*prompt, *choice.tokens], [*scored.prompt_texts, *choice.texts]
        logprobs = [*scored.prompt_logprobs, *choice.logprobs]
        tops = None
        if self._job.top_logprobs:
            places = zip([*scored.prompt_best, *scored.best], tokens, texts, logprobs)
            tops = [None if value is None else by_text(best, token, text, value) for best, token, text, value in places]
        offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
