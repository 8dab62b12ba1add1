"""DFlash drafts what its published module drafts from the target's hidden states, wherever these stand."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.cache.features import FeatureCache
from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.dflash import DFlash
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategy import Target
from jaxinfer.decoding.trees.dynamic import Growth
from jaxinfer.decoding.trees.static import read_tree
from jaxinfer.errors import CheckpointNotFound, InvalidOption
from jaxinfer.models.drafters.dflash import dflash_for
from tests.decoding.covered_models import SAMPLINGS
from tests.decoding.drafted_alone import state_of
from tests.decoding.fitted_dflash import expected_acceptance
from tests.decoding.rows import request, run
from tests.engine.harness import SMALL, Arrival, Harness, tokens_of
from tests.models.drafters.published_dflash import settings_for, write_published
from tests.toys import TINY_LLAMA, float32_backend, random_params

# So few tokens that drafts of random weights hit and miss.
CONFIG = replace(TINY_LLAMA, vocab_size=16, num_layers=4)
LENGTHS, LIMITS = (11, 2, 23, 5, 17), (40, 37, 33, 39, 36)
TREE = read_tree("6.4")


@pytest.fixture(scope="module")
def lm():
    return jaxinfer.LanguageModel(CONFIG, random_params(CONFIG, seed=3), float32_backend())


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, 16, length).tolist() for length in LENGTHS]
    return [request(*one) for one in zip(prompts, LIMITS, SAMPLINGS)]


@pytest.fixture(scope="module")
def oracle(lm, requests):
    return run(lm, requests)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_published(tmp_path_factory.mktemp("published"), settings_for(vocab_size=16))


def test_drafts_are_taken_as_the_published_module_has_them(lm, requests, oracle, folder):
    """Step by step against NumPy: the context that each block sees is of the tokens before it, all and no others."""
    strategy = lm.resolve(DFlash(heads=str(folder), paths=TREE))
    rows = run(lm, requests, strategy)
    assert [row.tokens for row in rows] == [row.tokens for row in oracle]
    expected = expected_acceptance(lm, folder, TREE, requests, [row.tokens for row in oracle])
    assert [(row.counts.steps, row.counts.accepted_by_depth) for row in rows] == [one[:2] for one in expected]
    # None of it holds for want of drafts.
    assert min(sum(one.accepted_by_depth[depth] for one in expected) for depth in range(2)) > 10
    assert sum(one.later_siblings for one in expected) > 10


@pytest.mark.exhaustive
def test_what_others_drafted_is_caught_up_with(lm, requests, oracle, folder):
    """In a sum whose other part drafts far more than a block, no step leaves tokens unread."""
    own = DFlash(heads=str(folder), tree="6.4")
    strategy = lm.resolve(SumOfDrafters((own, PromptLookup(num_draft_tokens=24, min_ngram=1))))
    assert strategy.parts[0].catch_up == strategy.max_depth + 1 > 2 + 1
    repeated = [request([*asked.prompt, *row.tokens, *asked.prompt], 40) for asked, row in zip(requests, oracle)]
    plain, rows = run(lm, repeated), run(lm, repeated, strategy)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert max(sum(row.counts.accepted_by_depth[3:]) for row in rows) > 0


@pytest.mark.exhaustive
def test_an_engine_drafts_as_a_batch_does_from_shared_pages_too(lm, requests, oracle, folder):
    """Whoever finds a prefix in the cache, or comes back to it, has the features of its tokens."""
    strategy = lm.resolve(DFlash(heads=str(folder), paths=TREE))
    harness = Harness(lm, strategy, replace(SMALL, pages=40))
    harness.core._pace = None
    alone = [row.counts.steps for row in run(lm, requests, strategy)]
    long = request([*requests[2].prompt, *oracle[2].tokens[:-6]], 20)
    asked = [*requests, long, replace(long, prompt=[*long.prompt])]
    served = harness.serve([Arrival(step, one) for step, one in zip((0, 0, 1, 2, 4, 30, 60), asked)])
    assert [tokens_of(one) for one in served[:5]] == [row.tokens for row in oracle]
    results = [one.origin.request.result(0.0) for one in served]
    assert [one.stats.steps for one in results[:5]] == alone
    assert served[6].cached_tokens > 0
    assert results[6].stats.steps == results[5].stats.steps


def test_the_tree_fits_the_block_and_the_device(lm, folder):
    strategy = parse_strategy(f"dflash:heads={folder}")
    on_cpu, on_tpu = (
        one.resolve(Target(lm.config, replace(lm.backend, platform=platform), lm.params))
        for one, platform in ((strategy, "cpu"), (strategy, "tpu"))
    )
    assert on_cpu.paths == on_tpu.paths == read_tree("chain:5")
    long = dflash_for(lm.config, block_size=16)
    assert (DFlash().shaped(long).max_depth, DFlash().shaped(long, most=8).max_depth) == (15, 7)
    assert DFlash(num_draft_tokens=9).shaped(long, most=8).max_depth == 9
    assert DFlash().bounded(5).shaped(long).headroom == 5
    assert DFlash(tree="dynamic:12", num_draft_tokens=4).shaped(long).growth == Growth(12, 4)
    assert DFlash(tree="4.2").shaped(long).headroom == 13


def test_mistakes_are_named_in_one_line(lm, folder, tmp_path):
    missing = tmp_path / "nowhere"
    cases = {
        "dflash": (InvalidOption, "name the folder of a drafter, as in dflash:heads=FOLDER"),
        f"dflash:heads={missing}": (CheckpointNotFound, "no such folder of a DFlash drafter"),
        f"dflash:heads={folder},num_draft_tokens=6": (InvalidOption, "6 tokens are more than the 5 that the drafter's"),
        f"dflash:heads={folder},tree=2.1.1.1.1.1": (InvalidOption, "6 tokens are more than the 5"),
        f"dflash:heads={folder},tree=own": (InvalidOption, "the drafter has no tree of its own"),
        f"dflash:heads={folder},tree=dynamic:9999": (InvalidOption, "a dynamic tree has 2 to 1024 nodes"),
        f"dflash:heads={folder},tree=4.2,num_draft_tokens=2": (InvalidOption, "leave num_draft_tokens out"),
        f"dflash:heads={folder},num_draft_tokens=65": (InvalidOption, "is not a whole number from 0 to 64"),
    }
    for spec, (kind, complaint) in cases.items():
        with pytest.raises(kind, match=complaint) as caught:
            lm.resolve(parse_strategy(spec))
        assert "\n" not in str(caught.value)


def test_features_are_read_in_the_order_of_the_file(lm):
    """Which need not be that of the layers, in which the cache holds them."""
    strategy = DFlash(dflash=replace(dflash_for(lm.config), features=(1, 0)))
    assert strategy.features == (0, 1)
    values_BSF = jnp.arange(2 * 4 * 2, dtype=jnp.float32).reshape(2, 4, 2)
    cache = LayeredCache((), FeatureCache(values_BSF, None, (0, 1)))
    state = state_of([[1], [2]])._replace(cache=cache)
    found_BTF = strategy._read(state, jnp.asarray([2, 0]), 2)
    assert found_BTF.tolist() == [[[5, 4], [7, 6]], [[9, 8], [11, 10]]]
