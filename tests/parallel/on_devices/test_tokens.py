"""A mesh decides only where things are computed: tokens are those of one device, whoever drafts them.

Log-probabilities are too, in every bit, unless an axis splits sums (`test_bits.py`). One strategy runs where
heads are split in every run, one where rows and tokens are in the wide run; others, each on a mesh of its own
(`tests.decoding.strategy_cases`), and the full product are marked exhaustive.
"""

from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.grammar.table import NO_TOKEN, TokenTable
from tests.decoding.covered_models import VOCAB_SIZE, random_prompts
from tests.decoding.identity import check_identical
from tests.decoding.strategy_cases import CASES, Split
from tests.parallel.on_devices.meshes import (
    MODELS,
    SPLIT_HEADS,
    SPLIT_LAYERS,
    SPLIT_TOKENS,
    check_communication,
    make_model,
    on_mesh,
    on_split,
)

EVERY_KIND = {
    "prompt_lookup": Split("tensor=4", "llama"),
    "draft_model+prompt_lookup": Split("tensor=4", "llama"),
    "medusa": Split("data=2,tensor=2", "llama"),
    "jacobi": Split("data=2,sequence=2", "llama"),
    "streams": Split("data=2,pipeline=2", "llama", 3),
}
RUNS = {"prompt_lookup": (), "jacobi": pytest.mark.slow}


def check(single, strategy: str, split: Split, **changes: Any) -> None:
    one, lm = on_split(single, split, **changes)
    fitted = CASES[strategy].strategy(split.model, one.lm, one.asked.texts)
    seen = check_identical(lm, one.asked, lm.resolve(fitted))
    assert not fitted.max_depth or seen["deep"] > 0
    assert lm.programs.compilations == 2
    check_communication(lm, split, strategy)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=RUNS.get(name, pytest.mark.exhaustive)) for name in EVERY_KIND],
)
def test_tokens_are_those_of_one_device(single, strategy):
    check(single, strategy, EVERY_KIND[strategy])


@pytest.mark.slow
def test_tokens_that_devices_find_in_their_own_slots_are_those_of_one_device(single):
    """Devices join what they find only without our CPU kernels."""
    check(single, "jacobi", Split("sequence=2,tensor=2", "llama"), cpu_kernels=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", CASES)
def test_tokens_of_every_strategy_are_those_of_one_device(single, strategy):
    check(single, strategy, CASES[strategy].split)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "mesh", "model"), list(product(CASES, (*SPLIT_HEADS, *SPLIT_TOKENS, *SPLIT_LAYERS), MODELS))
)
def test_all_tokens_are_those_of_one_device(single, strategy, mesh, model):
    check(single, strategy, Split(mesh, model, 5 if "pipeline" in mesh else None))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        ("pipeline=2", 2),
        *((mesh, None) for mesh in ("data=2,tensor=4", "sequence=2")),
    ],
)
def test_beam_search_keeps_the_texts_of_one_device(single, mesh, microbatches):
    one = single("llama")
    prompts = [list(request.prompt) for request in one.asked.requests[:2]]
    asked = {"max_new_tokens": 8, "strategy": "beam:width=3,n=2", "sampling": SamplingParams(logit_bias={5: -30.0})}
    expected = one.lm.generate(prompts, **asked)
    found = one.on(mesh, microbatches).generate(prompts, **asked)
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    bubble = 1 / 3 if microbatches else 0
    assert [result.stats.decode_bubble for result in (found[0], expected[0])] == [bubble, 0]


def drawn_table(seed: int) -> TokenTable:
    """Draw a grammar of five states, in each of which some of four classes may come; token 0 ends a text in one."""
    rng, num_states, end = np.random.default_rng(seed), 5, 4
    classes_V = rng.integers(0, end, VOCAB_SIZE).astype(np.int32)
    classes_V[:2] = end, 0
    next_NC = np.where(rng.random((num_states, end + 1)) < 0.3, rng.integers(0, num_states, (num_states, end + 1)), -1)
    next_NC[:, 0], next_NC[:, end] = (np.arange(num_states) + 1) % num_states, -1
    next_NC[-1, end] = num_states - 1
    allowed_NV = next_NC[:, classes_V] >= 0
    only_N = np.where(allowed_NV.sum(axis=1) == 1, allowed_NV.argmax(axis=1), NO_TOKEN)
    return TokenTable(classes_V, next_NC.astype(np.int32), only_N.astype(np.int32))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "sequence=2,tensor=2"])
def test_grammars_let_the_same_tokens_come_as_on_one_device(mesh):
    one = make_model("llama", num_layers=1)
    prompts = random_prompts()[:4]
    tables = [drawn_table(1), drawn_table(2), None, drawn_table(5)]
    sampling = [
        SamplingParams(grammar=table, temperature=0.9 * (row % 2), seed=row) for row, table in enumerate(tables)
    ]
    asked = {"max_new_tokens": 24, "sampling": sampling}
    expected = one.generate(prompts, **asked)
    found = on_mesh(one, mesh).generate(prompts, **asked, strategy="jacobi")
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    for result, table in zip(found, tables):
        assert len(result.tokens) > 4
        assert table is None or table.after(result.tokens) >= 0
    assert sum(result.stats.accepted for result in found) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["pipeline=2", "data=2,tensor=4"])
def test_a_streaming_cache_gives_the_text_of_one_device(single, mesh):
    one = single("llama")
    lm, layout = one.lm, {"cache": "streaming:sinks=2,window=20", "max_len": 200}
    prompts, asked = (
        [[5, 6, 7, 8], [9, 3, 2]],
        {"max_new_tokens": 60, "sampling": SamplingParams(temperature=1, seed=2)},
    )
    expected = LanguageModel(lm.config, lm.params, lm.backend, **layout).generate(prompts, **asked)
    split = LanguageModel(lm.config, lm.params, lm.backend, **layout, mesh=one.on(mesh).programs.partitioner.mesh)
    found = split.generate(prompts, **asked)
    assert len(jax.tree.leaves(split.params)[0].sharding.device_set) in (2, 8)
    assert [result.tokens for result in found] == [result.tokens for result in expected]
