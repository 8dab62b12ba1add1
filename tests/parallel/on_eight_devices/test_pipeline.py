"""Layers in stages: logits and tokens are those of one device, and stages send one another hidden states alone."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, MeshConfig, SamplingParams
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.streams import Streams
from jaxinfer.decoding.trees.static import read_tree
from jaxinfer.errors import InvalidOption
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.planning.hlo.collectives import collective_kind
from jaxinfer.planning.hlo.walk import Instruction, walk
from tests.decoding.identity import check_identical, check_screened
from tests.decoding.strategy_cases import CASES
from tests.models.drafters.dense_streams import random_adapters
from tests.parallel.on_eight_devices.meshes import MODELS, Single, is_search, make_single, sent
from tests.toys import random_params, write_tiny_llama

NUM_LAYERS = 4
TWO, FOUR = MeshConfig(pipeline=2), MeshConfig(pipeline=4)
TENSOR, ALL = MeshConfig(tensor=2, pipeline=2), MeshConfig(data=2, tensor=2, pipeline=2)

# Every strategy on two stages, with each family and with one and several microbatches in turn; and the other meshes.
COVER = [
    *((strategy, TWO, MODELS[index % len(MODELS)], 1 + 4 * (index % 2)) for index, strategy in enumerate(CASES)),
    ("streams", FOUR, "opt", 5),
    ("layerskip", TENSOR, "gemma2", 5),
    ("triforce", ALL, "llama", 3),
]
SUMS = [case for case in COVER if "+" in case[0]]


@pytest.fixture(scope="module")
def single() -> Callable[[str], Single]:
    """Return a function that makes each model, with its texts, once."""
    made: dict[str, Single] = {}

    def get(name: str) -> Single:
        if name not in made:
            made[name] = make_single(name, NUM_LAYERS)
        return made[name]

    return get


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_one_device(single, model):
    one = single(model)
    check_screened(one.lm, one.asked)
    texts = [*one.asked.texts, one.asked.texts[0][:9]]
    meshes = {"llama": {FOUR: 6, ALL: 3}, "gemma2": {TWO: 1, TENSOR: 3}, "opt": {FOUR: 1}, "gpt2": {TWO: 2}}[model]
    expected = np.asarray(one.lm.logits(texts))
    for mesh, microbatches in meshes.items():
        found = np.asarray(one.on(mesh, microbatches).logits(texts))
        for row, text in enumerate(texts):
            error = np.abs(found[row, : len(text)] - expected[row, : len(text)]).max()
            assert error <= 1e-5 * expected.std()


@pytest.mark.parametrize(("strategy", "mesh", "model", "microbatches"), [case for case in COVER if case not in SUMS])
def test_tokens_are_those_of_one_device(single, strategy, mesh, model, microbatches):
    check_tokens(single(model), strategy, mesh, model, microbatches)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "mesh", "model", "microbatches"), SUMS)
def test_sums_of_strategies_give_the_tokens_of_one_device(single, strategy, mesh, model, microbatches):
    check_tokens(single(model), strategy, mesh, model, microbatches)


def check_tokens(one: Single, strategy: str, mesh: MeshConfig, model: str, microbatches: int) -> None:
    lm, case = one.on(mesh, microbatches), CASES[strategy]
    fitted = case.strategy(MODELS.index(model), one.lm, one.asked.texts)
    seen = check_identical(lm, one.asked, lm.resolve(fitted))
    assert not fitted.max_depth or seen["deep"] > 0
    check_communication(lm)


def test_adapters_of_streams_act_in_stages_and_on_padded_heads_as_on_one_device(single):
    """Nine heads and 63 features on two devices each: the same drafts are taken and refused."""
    one = single("llama")
    streams = StreamsConfig(num_streams=3, num_layers=2)
    stream_params = init_streams(streams, one.lm.config, one.lm.backend, jax.random.key(0))
    blocks = jax.tree.map(jnp.asarray, random_adapters(one.lm.config, 2))
    adapted, idle = (
        Streams(params={**stream_params, "blocks": each}, num_layers=2, paths=read_tree("3.2.1"))
        for each in (blocks, jax.tree.map(jnp.zeros_like, blocks))
    )
    lm = one.on(ALL)
    expected = check_identical(one.lm, one.asked, one.lm.resolve(adapted))
    assert check_identical(lm, one.asked, lm.resolve(adapted)) == expected
    assert check_identical(one.lm, one.asked, one.lm.resolve(idle)) != expected


def check_communication(lm: LanguageModel) -> None:
    """Stages hand on what they computed; nothing else is sent but sums, and the best of each part of a vocabulary."""
    for compiled in lm.programs._compiled.values():
        hlo = compiled.as_text()
        kinds = {line.name: collective_kind(line.opcode) for line in sent(hlo)}
        assert "collective-permute" in kinds.values()
        others = [name for name, kind in kinds.items() if kind not in ("all-reduce", "collective-permute")]
        assert all(is_search(hlo, name) for name in others), others


def test_stages_send_hidden_states_and_keep_weights_and_cache(single):
    one, microbatches = single("llama"), 4
    lm = one.on(TWO, microbatches)
    lm.generate([[5, 6, 7]] * 4, max_new_tokens=3)
    name = next(key for key in lm.programs._compiled if key[0][0] == "decode")
    walked = [found for found in walk(lm.programs._compiled[name].as_text()) if found.collective]
    hidden_bytes = lm.config.model_dim * 4
    assert described(walked) == [
        ("all-reduce", 4 * hidden_bytes, 1),
        ("collective-permute", 4 // microbatches * hidden_bytes, microbatches + 1),
    ]
    kernel = lm.params["blocks"]["mlp"]["up"]["kernel"]
    assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {NUM_LAYERS // 2}
    cache = lm.programs.create_cache(4, 64, 1).parts[0].keys
    assert {shard.data.shape for shard in cache.addressable_shards} == {(NUM_LAYERS // 2, 4, 64, 24)}


def described(walked: list[Instruction]) -> list[tuple[str | None, int, int]]:
    return sorted((found.collective, found.bytes, found.runs) for found in walked)


def test_a_streaming_cache_gives_the_text_of_one_device(single):
    one, layout = single("llama"), {"cache": "streaming:sinks=2,window=20", "max_len": 200}
    lm, mesh = one.lm, TWO.build(jax.devices()[:2])
    prompts, asked = (
        [[5, 6, 7, 8], [9, 3, 2]],
        {"max_new_tokens": 60, "sampling": SamplingParams(temperature=1, seed=2)},
    )
    expected = LanguageModel(lm.config, lm.params, lm.backend, **layout).generate(prompts, **asked)
    found = LanguageModel(lm.config, lm.params, lm.backend, **layout, mesh=mesh).generate(prompts, **asked)
    assert [result.tokens for result in found] == [result.tokens for result in expected]


def test_beam_search_keeps_the_texts_of_one_device(single):
    one = single("llama")
    prompts = [list(request.prompt) for request in one.asked.requests[:2]]
    asked = {"max_new_tokens": 8, "strategy": "beam:width=3,n=2"}
    expected = one.lm.generate(prompts, **asked)
    found = one.on(TWO, 2).generate(prompts, **asked)
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert [result.stats.decode_bubble for result in (found[0], expected[0])] == [1 / 3, 0]


def test_a_draft_model_whose_layers_do_not_divide_is_on_every_stage(single):
    one = single("llama")
    config = replace(one.lm.config, num_layers=3)
    spec = parse_strategy("draft_model:num_draft_tokens=2")
    drafter = replace(spec, config=config, backend=one.lm.backend, params=random_params(config, seed=8))
    lm = one.on(TWO)
    resolved = lm.resolve(drafter)
    check_identical(lm, one.asked, resolved)
    assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(resolved.parameters)} == {True}
    check_communication(lm)


def test_kernels_run_inside_a_stage_on_each_devices_own_heads_and_rows(single):
    one = single("gpt2")
    backend, mesh = replace(one.lm.backend, kernels="reference"), ALL.build(jax.devices())
    expected = np.asarray(one.lm.logits([[5, 6, 7, 8], [9, 3, 2, 7]]))
    lm = LanguageModel(one.lm.config, one.lm.params, backend, mesh=mesh)
    found = np.asarray(lm.logits([[5, 6, 7, 8], [9, 3, 2, 7]]))
    assert np.abs(found - expected).max() <= 1e-5 * expected.std()


def test_a_saved_model_loads_on_other_meshes_bit_for_bit(tmp_path):
    source = write_tiny_llama(tmp_path / "source", num_layers=NUM_LAYERS)
    staged = jaxinfer.load(source, mesh=TWO.build(jax.devices()[:2]))
    assert staged.params["blocks"]["mlp"]["up"]["kernel"].addressable_shards[0].data.shape[0] == NUM_LAYERS // 2
    saved = staged.save(tmp_path / "saved")
    for mesh in (None, TENSOR.build(jax.devices()[:4])):
        expected, found = (jaxinfer.load(path, mesh=mesh).params for path in (source, saved))
        assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), expected, found))


def test_layers_that_do_not_divide_are_refused(single):
    with pytest.raises(
        InvalidOption, match=r"^mesh: 4 layers, 2 cycles of 2 kinds, do not split evenly over pipeline=4"
    ):
        single("gemma2").on(FOUR)
    with pytest.raises(InvalidOption, match="4 layers do not split evenly over pipeline=8 devices: choose a div"):
        single("opt").on(MeshConfig(pipeline=8))
