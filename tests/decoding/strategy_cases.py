"""How the tests make each registered strategy draft well, though not perfectly, for a tiny model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer import LanguageModel, Strategy
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.auto import Auto
from jaxinfer.decoding.strategies.cascade import Cascade
from jaxinfer.decoding.strategies.dflash import DFlash
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.eagle import Eagle
from jaxinfer.decoding.strategies.layerskip import LayerSkip
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.mtp import Mtp
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.streams import Streams
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategies.triforce import TriForce
from jaxinfer.decoding.trees.dynamic import read_growth
from jaxinfer.decoding.trees.static import Paths, read_tree
from jaxinfer.models.drafters.dflash import dflash_for
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.notation import Params
from tests.decoding.covered_models import VOCAB_SIZE
from tests.decoding.fitted_dflash import fit_dflash
from tests.decoding.fitted_eagle import fit_eagle
from tests.decoding.fitted_heads import fit_plain, sharpened
from tests.decoding.fitted_mtp import fit_mtp
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


def _fit_eagle(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, Eagle)
    shape, params = fit_eagle(lm, texts)
    return replace(strategy, shape=shape, params=params)


def _fit_dflash(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, DFlash)
    dflash = dflash_for(lm.config, block_size=4)
    params = jax.tree.map(lambda leaf: leaf.astype(lm.backend.param_dtype), fit_dflash(lm, dflash, texts))
    return replace(strategy, dflash=dflash, params=params)


def _fit_mtp(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, Mtp)
    return replace(strategy, params=fit_mtp(lm, [token for text in texts for token in text][:500]))


def _fit_triforce(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, TriForce)
    if not strategy.drafter:
        return strategy
    return replace(strategy, config=lm.config, backend=lm.backend, params=perturbed(lm.params, 0.15))


def _fit_layerskip(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, LayerSkip)
    return replace(strategy, exit_layer=lm.config.num_layers - 1)


def _fit_cascade(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    """Draft with weights much like the model's, and with fitted heads where a folder of them is named."""
    assert isinstance(strategy, Cascade)
    drafter = strategy.drafter
    if strategy.heads:
        parts = _fit_medusa(Medusa(), lm, texts), PromptLookup(num_draft_tokens=3)
        drafter = SumOfDrafters(parts, strategy.nodes)
    weights = perturbed(lm.params, 0.15)
    return replace(strategy, drafter=drafter, config=lm.config, backend=lm.backend, params=weights)


def _fit_auto(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    """Let weights much like the model's decode ahead of it."""
    ahead = Cascade(num_draft_tokens=4, config=lm.config, backend=lm.backend, params=perturbed(lm.params, 0.15))
    assert isinstance(strategy, Auto)
    return replace(strategy, cascade=ahead)


def _fit_parts(strategy: Strategy, lm: LanguageModel, texts: Texts) -> Strategy:
    assert isinstance(strategy, SumOfDrafters)
    return replace(strategy, parts=tuple(CASES[part.name].fit(part, lm, texts) for part in strategy.parts))


class Split(NamedTuple):
    """A mesh that a strategy runs on, the family of its model there, and the microbatches of a pipeline, if not 1."""

    mesh: str
    model: str
    microbatches: int | None = None


@dataclass(frozen=True)
class Case:
    """How one strategy is tested. What it meets is named here, so that another entry changes nothing for this one.

    ``spec`` is its specification, in place of which models (and rows ``alone``) named in ``others`` get another.
    ``model`` is the family that it meets in every run; the wide run has it meet all, one of them on ``split``.

    ``follows_sampling`` tells that its drafter knows the sampling parameters, so that a text that these force is
    drafted as deep as can be, after at most ``warm_up`` steps: until then a drafter that learns from the text has seen
    too little of it. Others guess a forced text by chance alone.
    """

    spec: str
    model: str
    split: Split
    fit: Fit = _as_it_is
    others: Mapping[str, str] = field(default_factory=dict)
    follows_sampling: bool = True
    warm_up: int = 0

    @property
    def specs(self) -> tuple[str, ...]:
        """All specifications, each once."""
        return tuple(dict.fromkeys((self.spec, *self.others.values())))

    def strategy(self, model: str, lm: LanguageModel, texts: Texts) -> Strategy:
        """Return the strategy for the model of this name, which writes such texts."""
        return self.of(self.others.get(model, self.spec), lm, texts)

    def of(self, spec: str, lm: LanguageModel, texts: Texts) -> Strategy:
        """Return the strategy of one of the specifications."""
        return lm.resolve(self.fit(parse_strategy(spec), lm, texts))


def forced_depth(strategy: Strategy) -> int:
    """Return how many drafts of a text that sampling forces one step takes: those of the deepest part that knows it."""
    parts = strategy.parts if isinstance(strategy, SumOfDrafters) else (strategy,)
    return max((part.max_depth for part in parts if CASES[part.name].follows_sampling), default=0)


# Every strategy that promises the tokens of plain decoding, and sums of such.
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "autoregressive": Case("autoregressive", "opt", Split("data=4,tensor=2", "gemma2")),
        "auto": Case(
            "auto:nodes=8",
            "gemma2",
            Split("data=2,tensor=2", "opt"),
            _fit_auto,
            {"gpt2": "auto:nodes=5"},
            follows_sampling=False,
        ),
        "draft_model": Case(
            "draft_model:num_draft_tokens=3",
            "gemma2",
            Split("tensor=8", "opt"),
            _fit_draft_model,
            {
                "opt": "draft_model:tree=3.2.1",
                "stories": "draft_model:tree=dynamic:12",
                "gpt2": "draft_model:schedule=bass,num_draft_tokens=2,max_draft_tokens=6",
                "float64": "draft_model:schedule=confidence,num_draft_tokens=5",
                "alone": "draft_model:schedule=heuristic,num_draft_tokens=2,max_draft_tokens=6",
            },
        ),
        "cascade": Case(
            "cascade:heads=fitted,num_draft_tokens=4,nodes=8",
            "gemma2",
            Split("data=2,tensor=2", "opt"),
            _fit_cascade,
            {
                "opt": "cascade:num_draft_tokens=5,nodes=4",
                "gpt2": "cascade:heads=fitted,num_draft_tokens=6,nodes=6",
                "trained": "cascade:heads=fitted,num_draft_tokens=3,nodes=6",
            },
        ),
        "prompt_lookup": Case(
            "prompt_lookup:num_draft_tokens=4",
            "opt",
            Split("data=2,tensor=4", "gpt2"),
            others={"gemma2": "prompt_lookup:num_draft_tokens=4,match=first,max_ngram=2"},
            warm_up=2,
        ),
        "suffix": Case(
            "suffix:num_draft_tokens=6,min_match=1,per_token=6",
            "gemma2",
            Split("data=2,tensor=2", "opt"),
            others={"gpt2": "suffix:num_draft_tokens=5,occurrences=3,max_match=2"},
            warm_up=2,
        ),
        "token_recycling": Case(
            "token_recycling:tree=dynamic:8",
            "opt",
            Split("data=2,tensor=2", "gpt2"),
            others={"gemma2": "token_recycling:tree=3.2.1,context=2", "gpt2": "token_recycling:tree=published"},
            follows_sampling=False,
        ),
        "jacobi": Case("jacobi:num_draft_tokens=4", "gemma2", Split("pipeline=2", "gpt2", 5), warm_up=1),
        "lookahead": Case(
            "lookahead:window=4,ngram=4,guesses=4,pool=64",
            "opt",
            Split("sequence=4", "gpt2"),
            others={"gemma2": "lookahead:window=3,ngram=3,guesses=6,pool_from_prompt=true"},
            warm_up=6,
        ),
        "medusa": Case(
            "medusa",
            "opt",
            Split("data=2,sequence=2,tensor=2", "gpt2"),
            _fit_medusa,
            {"gemma2": "medusa:tree=dynamic:10", "gpt2": "medusa:tree=dynamic:10"},
            follows_sampling=False,
        ),
        "eagle": Case(
            "eagle:tree=dynamic:6,depth=3",
            "opt",
            Split("data=2,tensor=2", "gemma2"),
            _fit_eagle,
            {"gemma2": "eagle:tree=3.2", "gpt2": "eagle:tree=chain:3"},
            follows_sampling=False,
        ),
        "streams": Case(
            "streams",
            "gemma2",
            Split("pipeline=4", "opt", 5),
            _fit_streams,
            {"gemma2": "streams:prune_below=0.02,keep_nodes=6", "gpt2": "streams:prune_below=0.02,keep_nodes=6"},
            follows_sampling=False,
        ),
        "layerskip": Case(
            "layerskip:num_draft_tokens=3", "gemma2", Split("tensor=2,pipeline=2", "gemma2", 5), _fit_layerskip
        ),
        "mtp": Case("mtp:num_draft_tokens=3", "opt", Split("data=2", "gpt2"), _fit_mtp),
        "triforce": Case(
            "triforce:num_draft_tokens=4,budget=4,chunk=4,sinks=1,window=2,renew_steps=3",
            "gemma2",
            Split("data=2,tensor=2,pipeline=2", "llama", 3),
            _fit_triforce,
            {
                "opt": "triforce:num_draft_tokens=3,num_inner_tokens=0,budget=8,chunk=8,window=2",
                "gpt2": "triforce:drafter=small,num_draft_tokens=4,num_inner_tokens=2,budget=8,chunk=4,window=12",
            },
        ),
        "dflash": Case(
            "dflash",
            "opt",
            Split("data=2,tensor=2", "gemma2"),
            _fit_dflash,
            {"gemma2": "dflash:tree=dynamic:8", "gpt2": "dflash:tree=3.2.1"},
            follows_sampling=False,
        ),
        "draft_model+prompt_lookup": Case(
            "draft_model:num_draft_tokens=3+prompt_lookup:num_draft_tokens=4,min_ngram=1",
            "opt",
            Split("sequence=2", "gemma2"),
            _fit_parts,
            {
                "gemma2": "draft_model:num_draft_tokens=3+prompt_lookup:num_draft_tokens=4,min_ngram=1+nodes=6",
                "llama": "draft_model:num_draft_tokens=3+prompt_lookup:num_draft_tokens=4,min_ngram=1+nodes=6",
            },
            warm_up=1,
        ),
        "streams+prompt_lookup": Case(
            "streams+prompt_lookup:num_draft_tokens=3+nodes=64",
            "gemma2",
            Split("tensor=4", "llama"),
            _fit_parts,
            {"opt": "streams+prompt_lookup:num_draft_tokens=3+nodes=8"},
            warm_up=2,
        ),
        "medusa+jacobi": Case(
            "medusa+jacobi:num_draft_tokens=3", "opt", Split("data=2", "gemma2"), _fit_parts, warm_up=1
        ),
    }
)
