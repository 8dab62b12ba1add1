"""Hidden states of answers, each with what the whole answer was worth, and the order in which they are learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.errors import InvalidOption, JaxinferError
from jaxinfer.language_model import LanguageModel
from jaxinfer.tokenizers import Tokenizer
from train.features.hidden_states import HiddenStates
from train.texts.packing import Example
from train.texts.records import Record, messages_of, read_records

# The largest score: a head's squares of it must be finite in float32.
_MOST = 1e18


class Rollout(NamedTuple):
    """A text as token ids, of which the first ``num_prompt`` are a prompt's, and what a checker says of it."""

    tokens: tuple[int, ...]
    num_prompt: int
    score: float

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's ids."""
        return self.tokens[: self.num_prompt]

    @property
    def example(self) -> Example:
        """The text as trainers read it."""
        return Example(self.tokens, tuple(at >= self.num_prompt for at in range(len(self.tokens))))


def read_rollouts(path: Path, lm: LanguageModel) -> list[Rollout]:
    """Read a file of JSON lines, each with a ``score``: rollouts, prompts with a response, or texts.

    A search reads no stop token, so answers lose theirs, and those that are nothing else are left out. Errors name the
    line.
    """
    rollouts = []
    for record in read_records(path):
        score = record.fields.get("score")
        if not isinstance(score, int | float) or not abs(score) <= _MOST:
            raise InvalidOption(f"{record.where}: needs a 'score', a finite number, and has {score!r:.40}")
        try:
            prompt, answer = _ids(record.fields, record, lm.tokenizer)
        except JaxinferError as error:
            message = str(error)
            raise InvalidOption(message if record.where in message else f"{record.where}: {message}") from None
        if answer and answer[-1] in lm.eos_token_ids:
            answer = answer[:-1]
            if not answer:
                continue
        tokens = (*prompt, *answer)
        if not answer or len(tokens) > lm.max_len:
            raise InvalidOption(f"{record.where}: {len(answer)} tokens after {len(prompt)} do not fit {lm.max_len}")
        if not all(type(one) is int and 0 <= one < lm.config.vocab_size for one in tokens):
            raise InvalidOption(f"{record.where}: holds token ids that the model does not have: it is of another model")
        rollouts.append(Rollout(tokens, len(prompt), float(score)))
    if not rollouts:
        raise InvalidOption(f"{path}: all answers are nothing but a stop token")
    return rollouts


def _ids(fields: Mapping[str, Any], record: Record, tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids of a prompt and of what was written after it."""
    if isinstance(fields.get("prompt_tokens"), list) and isinstance(fields.get("tokens"), list):
        return fields["prompt_tokens"], fields["tokens"]
    if isinstance(fields.get("prompt"), str) and isinstance(fields.get("response"), str):
        prompt = tokenizer.encode(fields["prompt"])
        return prompt, tokenizer.encode(fields["response"], add_special_tokens=False)
    if isinstance(fields.get("text"), str) and messages_of(record) is None:
        return (), tokenizer.encode(fields["text"])
    raise InvalidOption(f"{record.where}: needs 'prompt_tokens' and 'tokens', 'prompt' and 'response', or 'text'")


class ValueBatch(NamedTuple):
    """States of P tokens and the scores of their texts, in units of the training scores' spread around their mean."""

    hidden_PD: Any
    scores_P: Any


@dataclass(frozen=True)
class ValueSource:
    """The states of some texts; ``mean`` and ``spread`` are of the scores that are trained on."""

    hidden_PD: np.ndarray
    texts_P: np.ndarray
    places: np.ndarray
    scores: np.ndarray
    mean: float
    spread: float

    @classmethod
    def of(cls, states: HiddenStates, texts: np.ndarray, scores: np.ndarray, mean: float, spread: float) -> Any:
        """Return the source of some texts, by their numbers; ``scores`` are those of all texts."""
        places = np.flatnonzero(np.isin(states.texts_P, texts))
        return cls(states.hidden_PD, np.asarray(states.texts_P), places, scores, mean, spread)

    @property
    def count(self) -> int:
        """The number of states."""
        return len(self.places)

    def take(self, items: np.ndarray) -> ValueBatch:
        """Return some states."""
        at = self.places[items]
        scores_P = (self.scores[self.texts_P[at]] - self.mean) / self.spread
        return ValueBatch(np.asarray(self.hidden_PD[at], np.float32), scores_P.astype(np.float32))


def split_prompts(rollouts: Sequence[Rollout], held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the rollouts to train on, and of those held out: all of a prompt are on one side.

    Texts without a prompt are each on their own.
    """
    kinds: dict[Any, list[int]] = {}
    for number, rollout in enumerate(rollouts):
        kinds.setdefault(rollout.prompt or number, []).append(number)
    groups = list(kinds.values())
    count = max(1, round(held_out * len(groups)))
    if count >= len(groups):
        raise InvalidOption(f"{len(groups)} prompts leave none to train on: give more, or a smaller --held-out")
    order = np.random.default_rng(seed).permutation(len(groups))
    parts = [np.sort(np.concatenate([groups[at] for at in part])) for part in (order[count:], order[:count])]
    return parts[0], parts[1]
