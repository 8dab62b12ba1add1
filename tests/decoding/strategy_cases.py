"""How the tests make each registered strategy draft well, though not perfectly, for a tiny model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import numpy as np

from jaxinfer import LanguageModel, Strategy
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.layerskip import LayerSkip
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.streams import Streams
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.trees.dynamic import read_growth
from jaxinfer.decoding.trees.static import Paths, read_tree
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.notation import Params
from tests.decoding.covered_models import VOCAB_SIZE
from tests.decoding.fitted_heads import fit_plain, sharpened
from tests.decoding.fitted_streams import fit_streams
from tests.models.drafters.dense_streams import random_adapters

TREE: Paths = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0))

Texts = Sequence[Sequence[int]]
Fit = Callable[[Strategy, LanguageModel, Texts], Strategy]


def _as_it_is(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    return strategy


def with_model(strategy: Strategy, lm: LanguageModel, weights: Params) -> DraftModel:
    """Give draft_model a drafter of the target's own network."""
    assert isinstance(strategy, DraftModel)
    return replace(strategy, config=lm.config, backend=lm.backend, params=weights)


def perturbed(params: Params, amount: float) -> Params:
    """Add noise to every array, in proportion to its deviation."""
    rng = np.random.default_rng(7)

    def add(leaf: jax.Array) -> jax.Array:
        return leaf + amount * leaf.std() * rng.standard_normal(leaf.shape).astype(leaf.dtype)

    return jax.tree.map(add, params)


def _fit_draft_model(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    return with_model(strategy, lm, perturbed(lm.params, 0.15))


def _fit_medusa(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, Medusa)
    heads = sharpened(fit_plain(lm, [token for text in texts for token in text][:500], 3))
    params = jax.tree.map(lambda leaf: leaf.astype(lm.backend.param_dtype), heads)
    return replace(strategy, params=params, paths=() if read_growth(strategy.tree) else TREE)


def _fit_streams(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    """Train streams; those of random models, whose few tokens are easily guessed, are good as they begin."""
    assert isinstance(strategy, Streams)
    streams = StreamsConfig(num_streams=3, num_layers=1, rank=16, adapter_rank=3)
    if lm.config.vocab_size == VOCAB_SIZE:
        params = init_streams(streams, lm.config, lm.backend, jax.random.key(0))
        params["blocks"] = jax.tree.map(lambda leaf: leaf.astype(lm.backend.param_dtype), random_adapters(lm.config, 1))
    else:
        params = fit_streams(lm, streams, [token for text in texts for token in text])
    return replace(strategy, params=params, num_layers=1, paths=read_tree("3.2.1"))


def _fit_layerskip(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, LayerSkip)
    return replace(strategy, exit_layer=lm.config.num_layers - 1)


def _fit_parts(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, SumOfDrafters)
    return replace(strategy, parts=tuple(CASES[part.name].fit(part, lm, texts) for part in strategy.parts))


@dataclass(frozen=True)
class Case:
    """Specifications of one strategy, of which each model gets another, and what they need to draft well.

    ``follows_sampling`` tells that drafts know the sampling parameters, so that a text that these force is drafted
    whole, after at most ``warm_up`` steps; others never guess it.
    """

    specs: tuple[str, ...]
    fit: Fit = _as_it_is
    follows_sampling: bool = True
    warm_up: int = 0

    def strategy(self, index: int, lm: LanguageModel, texts: Texts) -> Strategy:
        """Return the specification with this index, counted around, for a model that writes such texts."""
        return lm.resolve(self.fit(parse_strategy(self.specs[index % len(self.specs)]), lm, texts))


# Every strategy that promises the tokens of plain decoding, and sums of such.
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "autoregressive": Case(("autoregressive",)),
        "draft_model": Case(
            (
                "draft_model:num_draft_tokens=3",
                "draft_model:schedule=heuristic,num_draft_tokens=2,max_draft_tokens=6",
                "draft_model:schedule=confidence,num_draft_tokens=5",
                "draft_model:schedule=bass,num_draft_tokens=2,max_draft_tokens=6",
            ),
            _fit_draft_model,
        ),
        "prompt_lookup": Case(
            ("prompt_lookup:num_draft_tokens=4", "prompt_lookup:num_draft_tokens=4,match=first,max_ngram=2"), warm_up=2
        ),
        "jacobi": Case(("jacobi:num_draft_tokens=4",), warm_up=1),
        "lookahead": Case(
            (
                "lookahead:window=4,ngram=4,guesses=4,pool=64",
                "lookahead:window=3,ngram=3,guesses=6,pool_from_prompt=true",
            ),
            warm_up=6,
        ),
        "medusa": Case(("medusa", "medusa:tree=dynamic:10"), _fit_medusa, follows_sampling=False),
        "streams": Case(("streams", "streams:prune_below=0.02,keep_nodes=6"), _fit_streams, follows_sampling=False),
        "layerskip": Case(("layerskip:num_draft_tokens=3",), _fit_layerskip),
        "triforce": Case(
            (
                "triforce:num_draft_tokens=4,budget=4,chunk=4,sinks=1,window=2,renew_steps=3",
                "triforce:num_draft_tokens=3,num_inner_tokens=0,budget=8,chunk=8,window=2",
            )
        ),
        "draft_model+prompt_lookup": Case(
            (
                "draft_model:num_draft_tokens=3+prompt_lookup:num_draft_tokens=4,min_ngram=1",
                "draft_model:num_draft_tokens=3+prompt_lookup:num_draft_tokens=4,min_ngram=1+nodes=6",
            ),
            _fit_parts,
        ),
        "streams+prompt_lookup": Case(
            (
                "streams+prompt_lookup:num_draft_tokens=3+nodes=64",
                "streams+prompt_lookup:num_draft_tokens=3+nodes=8",
            ),
            _fit_parts,
            warm_up=2,
        ),
        "medusa+jacobi": Case(("medusa+jacobi:num_draft_tokens=3",), _fit_parts, warm_up=1),
    }
)
