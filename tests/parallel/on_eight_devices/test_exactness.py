"""A mesh decides only where things are computed: logits and tokens are those of one device.

Meshes, strategies and families are covered in pairs; the full product is marked exhaustive.
"""

import jax
import numpy as np
import pytest

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.planning.hlo.collectives import collective_kind
from tests.decoding.identity import check_identical, check_screened
from tests.decoding.strategy_cases import CASES
from tests.parallel.on_eight_devices.meshes import MESHES, MODELS, Single, is_search, sent

# Each strategy meets each of these meshes once and each family once, and each mesh every family.
COVER = [
    (strategy, mesh, MODELS[(row + column) % len(MODELS)])
    for row, strategy in enumerate(CASES)
    for column, mesh in enumerate(list(MESHES)[: len(MODELS)])
]
REST = [
    (strategy, mesh, model)
    for strategy in CASES
    for mesh in MESHES
    for model in MODELS
    if (strategy, mesh, model) not in COVER
]


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_one_device(single, model):
    one = single(model)
    check_screened(one.lm, one.asked)
    expected = np.asarray(one.lm.logits(one.asked.texts))
    for mesh in MESHES.values():
        found = np.asarray(one.on(mesh).logits(one.asked.texts))
        assert found.shape == expected.shape
        for row, text in enumerate(one.asked.texts):
            error = np.abs(found[row, : len(text)] - expected[row, : len(text)]).max()
            assert error <= 1e-5 * expected.std()


@pytest.mark.parametrize(("strategy", "mesh", "model"), COVER)
def test_tokens_are_those_of_one_device(single, strategy, mesh, model):
    check_tokens(single(model), strategy, mesh, model)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "mesh", "model"), REST)
def test_all_tokens_are_those_of_one_device(single, strategy, mesh, model):
    check_tokens(single(model), strategy, mesh, model)


def check_tokens(one: Single, strategy: str, mesh: str, model: str) -> None:
    lm, case = one.on(MESHES[mesh]), CASES[strategy]
    fitted = case.strategy(MODELS.index(model), one.lm, one.asked.texts)
    seen = check_identical(lm, one.asked, lm.resolve(fitted))
    assert not fitted.max_depth or seen["deep"] > 0
    assert lm.programs.compilations == 2
    check_communication(lm)


def check_communication(lm: LanguageModel) -> None:
    """Devices add up what they have, and gather nothing but the best of each part of a vocabulary."""
    for compiled in lm.programs._compiled.values():
        check_reductions(compiled)


def check_reductions(compiled: jax.stages.Compiled) -> None:
    hlo = compiled.as_text()
    gathered = [line.name for line in sent(hlo) if collective_kind(line.opcode) != "all-reduce"]
    assert all(is_search(hlo, name) for name in gathered), gathered


def test_beam_search_keeps_the_texts_of_one_device(single):
    one = single("llama")
    prompts = [list(request.prompt) for request in one.asked.requests]
    asked = {"max_new_tokens": 12, "strategy": "beam:width=3,n=2", "sampling": SamplingParams(logit_bias={5: -30.0})}
    expected = one.lm.generate(prompts, **asked)
    found = one.on(MESHES["data=2,tensor=4"]).generate(prompts, **asked)
    assert [result.tokens for result in found] == [result.tokens for result in expected]


def test_a_streaming_cache_gives_the_text_of_one_device(single):
    lm, mesh = single("llama").lm, MESHES["data=2,tensor=4"].build(jax.devices())
    layout = {"cache": "streaming:sinks=2,window=20", "max_len": 200}
    prompts, asked = (
        [[5, 6, 7, 8], [9, 3, 2]],
        {"max_new_tokens": 60, "sampling": SamplingParams(temperature=1, seed=2)},
    )
    expected = LanguageModel(lm.config, lm.params, lm.backend, **layout).generate(prompts, **asked)
    found = LanguageModel(lm.config, lm.params, lm.backend, **layout, mesh=mesh).generate(prompts, **asked)
    assert [result.tokens for result in found] == [result.tokens for result in expected]


def test_what_is_loaded_for_a_strategy_is_placed_beside_the_model(single):
    one = single("llama")
    lm = one.on(MESHES["tensor=2"])
    drafter = lm.resolve(CASES["draft_model"].strategy(0, one.lm, one.asked.texts))
    heads = lm.resolve(CASES["medusa"].strategy(0, one.lm, one.asked.texts))
    for strategy in (drafter, heads):
        assert {
            leaf.sharding.device_set == set(lm.programs.partitioner.mesh.devices.flat)
            for leaf in jax.tree.leaves(strategy.parameters)
        } == {True}
    kernel = drafter.parameters["blocks"]["layer_0"]["mlp"]["up"]["transposed_kernel"]
    assert kernel.addressable_shards[0].data.shape == (32, 32)
    output = heads.parameters["heads"][0]["output"]["kernel"]
    assert output.addressable_shards[0].data.shape[0] == output.shape[0] // 2
