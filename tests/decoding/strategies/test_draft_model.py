"""A draft model drafts what it says of the text and of each node's path; the target's first layers are one."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import shallower
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.stacking import arranged
from jaxinfer.sampling.noise import ROLE_TARGET, gumbel, request_key
from tests.decoding.covered_models import random_model, random_prompts
from tests.decoding.recorded import record
from tests.decoding.rows import request
from tests.decoding.strategy_cases import perturbed, with_model
from tests.toys import TINY_LLAMA, float32_backend, random_params

TEMPERATURE = 0.7
# Of texts and the paths of their nodes.
LONGEST = 48
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=TEMPERATURE, seed=4))


@cache
def target() -> LanguageModel:
    """Return a model whose first layer has a window of 16 tokens."""
    return random_model("gemma2")


@cache
def first() -> LanguageModel:
    """Return the model of its first layer."""
    lm = target()
    config = shallower(lm.config, 1)
    return LanguageModel(config, arranged(lm.params, abstract_params(config, lm.backend)), lm.backend)


def ranks(lm: LanguageModel, texts: Sequence[tuple[int, list[int]]]) -> list[list[int]]:
    """Return all tokens, as a model ranks them after each row's text with the noise that the next is drawn with."""
    # The last one gives all calls one shape.
    logits_NTV = np.asarray(lm.logits([*(text for _, text in texts), [1] * LONGEST]))
    ranked = []
    for (row, text), logits_TV in zip(texts, logits_NTV):
        logits_V = logits_TV[len(text) - 1]
        if SAMPLINGS[row].temperature:
            ids_V = jnp.arange(len(logits_V))
            noise_V = gumbel(jnp.asarray(request_key(SAMPLINGS[row].seed)), jnp.int32(len(text)), ROLE_TARGET, ids_V)
            logits_V = logits_V / TEMPERATURE + np.asarray(noise_V)
        ranked.append(np.argsort(-logits_V, kind="stable").tolist())
    return ranked


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("model=self,layers=1,tree=2.2.1", marks=pytest.mark.slow),
        pytest.param("tree=dynamic:7,num_draft_tokens=3", marks=pytest.mark.exhaustive),
    ],
)
def test_every_node_is_what_the_model_ranks_there_after_the_text_and_the_nodes_path(spec):
    """Also past the windows, and after steps in which none, some or all of a path were taken."""
    lm, drafter = target(), first()
    strategy = parse_strategy(f"draft_model:{spec}")
    assert isinstance(strategy, DraftModel)
    if not strategy.model:
        drafter = LanguageModel(lm.config, perturbed(lm.params, 0.15), lm.backend)
        strategy = with_model(strategy, drafter, drafter.params)
    strategy = lm.resolve(strategy)
    requests = [request(prompt, 24, sampling) for prompt, sampling in zip(random_prompts()[-2:], SAMPLINGS)]
    drafted = list(record(lm, strategy, requests, 3))
    for one in drafted:
        after = [(one.row, [*one.text, *path]) for path in one.paths]
        for node, ranked in enumerate(ranks(drafter, after)):
            children = [path[-1] for path, parent in zip(one.paths, one.parents) if parent == node]
            assert children == ranked[: len(children)]
    assert len({len(one.text) for one in drafted}) > 3
    assert max(len(one.text) for one in drafted) > 20


@pytest.mark.exhaustive
def test_first_layers_draft_as_a_model_of_their_weights_would():
    lm, exit_model = target(), first()
    alone = DraftModel(num_draft_tokens=3, config=exit_model.config, backend=lm.backend, params=exit_model.params)
    shared = parse_strategy("draft_model:model=self,layers=1,num_draft_tokens=3")
    found = [lm.generate(random_prompts()[:2], max_new_tokens=16, strategy=one) for one in (alone, shared)]
    for one, other in zip(*found):
        assert one.tokens == other.tokens
        assert one.stats.accepted_by_depth == other.stats.accepted_by_depth
        assert one.stats.target_passes == one.stats.steps
        assert other.stats.target_passes == pytest.approx(other.stats.steps * (1 + 3 / 2))
    assert sum(one.stats.accepted for one in found[0]) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ["tree=2.2.1", "tree=dynamic:6,num_draft_tokens=3", "weights=int8", "tree=chain:3"])
@pytest.mark.parametrize("scan", [False, True])
def test_first_layers_keep_the_text(options, scan):
    config = replace(TINY_LLAMA, num_layers=4)
    backend = float32_backend(scan)
    lm = LanguageModel(config, random_params(config, 2, scan), backend)
    prompts = [[5, 9, 30, 77, 12], [8, 200]]
    for sampling in SAMPLINGS:
        plain, drafted = (
            lm.generate(prompts, max_new_tokens=12, sampling=sampling, strategy=strategy)
            for strategy in ("autoregressive", f"draft_model:model=self,layers=3,{options}")
        )
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert sum(one.stats.accepted for one in drafted) > 0


@pytest.mark.parametrize(
    ("spec", "mend"),
    [
        ("model=self,layers=5", "layers 5: the model has 2 layers"),
        ("model=self,layers=-1", "layers=-1 is not a whole number from 0"),
        ("model=self,layers=5,weights=int8", "layers 5: the model has 2 layers"),
        ("model=self,tree=3.2,schedule=bass", "schedule=bass sets a chain's length: leave tree= out"),
        ("model=self,tree=3.2,num_draft_tokens=4", "leave num_draft_tokens= out"),
        ("model=self,tree=3.2,max_draft_tokens=4", "leave max_draft_tokens= out"),
        ("model=self,tree=dynamic:8,verify=rejection", "choose a tree of ranks"),
        ("model=self,tree=dynamic:1", "2 to 1024 nodes"),
        ("model=self,tree=dynamic:900,num_draft_tokens=1", "1 levels grow at most"),
        ("model=self,tree=300", "ranks more than 258 tokens"),
        ("model=self,tree=oak", "is none of"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_a_line(spec, mend):
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())
    with pytest.raises(InvalidOption, match=mend):
        lm.resolve(f"draft_model:{spec}")


def test_rejection_needs_every_rank_before_a_sibling():
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())
    strategy = DraftModel(model="self", layers=1, verify="rejection", paths=((0,), (2,)))
    with pytest.raises(InvalidOption, match=r"needs the ranks before \[2\]"):
        lm.resolve(strategy)
    assert lm.resolve(replace(strategy, paths=((0,), (1,)))).has_distinct_siblings
