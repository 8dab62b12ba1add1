"""Features are what the chosen layers read, of every token of a text, however it was decoded and is laid out."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.decoding.batch import Request, RunningBatch, pad_texts
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategies.token_recycling import TokenRecycling
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.models.decoder import create_cache
from jaxinfer.models.model import Model
from tests.toys import fable_tokens

LAYERS = (0, 1, 2)
PROMPTS = (fable_tokens(3), fable_tokens(1, 5)[:7], fable_tokens(2, 9))


class _Reads:
    features: ClassVar[tuple[int, ...]] = LAYERS


@dataclass(frozen=True)
class ReadingLookup(_Reads, PromptLookup):
    """Prompt lookup that has features kept beside it."""


@dataclass(frozen=True)
class ReadingRecycling(_Reads, TokenRecycling):
    """Token recycling, whose trees branch, that has features kept beside it."""

    features: ClassVar[tuple[int, ...]] = (1,)


@dataclass(frozen=True)
class OwnVerification(PromptLookup):
    """Prompt lookup that serves any tree in a way of its own."""

    verifies_any_tree: ClassVar[bool] = True

    def forward(self, *inputs: Any) -> Any:
        return super().forward(*inputs)


def decoded(lm: LanguageModel, strategy: Any) -> RunningBatch:
    """Decode the prompts to an end."""
    sampling = SamplingParams(temperature=0.7, seed=4)
    requests = [Request(prompt, len(prompt) + 40, sampling) for prompt in PROMPTS]
    batch = RunningBatch(lm.programs, lm.params, lm.resolve(strategy), requests, (), 256)
    while not batch.done:
        batch.advance(7)
    return batch


def expected(lm: LanguageModel, texts: list[list[int]], layers: tuple[int, ...]) -> np.ndarray:
    """Return the features of whole texts, by one pass over them."""
    tokens_BT, lengths_B = map(jnp.asarray, pad_texts(texts, lm.backend))
    cache = create_cache(lm.config, *tokens_BT.shape, lm.backend, features=layers)
    _, cache = forward_prompt(Model(lm.programs.decoder, lm.params), tokens_BT, lengths_B, cache, 512)
    return np.asarray(cache.features.values)


CHAIN, SUM = ReadingLookup(), SumOfDrafters((ReadingLookup(), ReadingRecycling()))


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        pytest.param(CHAIN, "dense", id="chain-dense", marks=pytest.mark.exhaustive),
        pytest.param(CHAIN, "paged:page=16", id="chain-paged:page=16", marks=pytest.mark.slow),
        pytest.param(SUM, "dense", id="sum-dense", marks=pytest.mark.slow),
        pytest.param(SUM, "paged:page=16", id="sum-paged:page=16", marks=pytest.mark.exhaustive),
    ],
)
def test_features_of_decoded_texts_are_those_of_a_pass_over_them(trained_folder, layout, strategy):
    lm = load(trained_folder, cache=layout)
    batch = decoded(lm, strategy)
    state = batch._state
    texts = [np.asarray(state.tokens_BS[row, : state.lengths_B[row]]).tolist() for row in range(len(PROMPTS))]
    assert sum(batch.counts(row).accepted for row in range(3)) > 10
    places_BT = jnp.broadcast_to(jnp.arange(max(map(len, texts))), (3, max(map(len, texts))))
    for layers in (LAYERS, (2,)):
        found = np.asarray(state.cache.features.read(places_BT, layers))
        wanted = expected(lm, texts, layers)
        for row, text in enumerate(texts):
            # The last token is not in the cache.
            known = len(text) - 1
            np.testing.assert_allclose(found[row, :known], wanted[row, :known], atol=1e-4)


@pytest.mark.exhaustive
def test_the_text_is_the_same_with_features(trained_model):
    results = [
        trained_model.generate(
            list(PROMPTS), strategy=strategy, max_new_tokens=30, sampling=SamplingParams(temperature=0.9, seed=3)
        )
        for strategy in ("autoregressive", ReadingLookup())
    ]
    assert [result.tokens for result in results[0]] == [result.tokens for result in results[1]]


def test_verification_that_keeps_no_features_is_refused_beside_who_reads_them(trained_model):
    with pytest.raises(InvalidOption, match="keeps no features"):
        trained_model.resolve(SumOfDrafters((ReadingLookup(), OwnVerification())))
