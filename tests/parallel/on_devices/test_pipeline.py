"""Layers in stages: stages send one another hidden states alone, and each keeps its own weights and cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.streams import Streams
from jaxinfer.decoding.trees.static import read_tree
from jaxinfer.errors import InvalidOption
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.planning.hlo.walk import Instruction, walk
from tests.decoding.identity import check_identical
from tests.decoding.strategy_cases import Split
from tests.models.drafters.dense_streams import random_adapters
from tests.parallel.on_devices.meshes import Single, check_communication, make_model
from tests.toys import random_params


def test_stages_send_hidden_states_and_keep_weights_and_cache(single):
    one, microbatches = single("llama"), 4
    lm = one.on("pipeline=2", microbatches)
    lm.generate([[5, 6, 7]] * 4, max_new_tokens=3)
    name = next(key for key in lm.programs.live if key[0][0] == "decode")
    walked = [found for found in walk(lm.programs.live[name].as_text()) if found.collective]
    hidden_bytes = lm.config.model_dim * 4
    assert described(walked) == [
        ("all-reduce", 4 * hidden_bytes, 1),
        ("collective-permute", 4 // microbatches * hidden_bytes, microbatches + 1),
    ]
    num_layers = lm.config.num_layers
    kernel = lm.params["blocks"]["mlp"]["up"]["kernel"]
    assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {num_layers // 2}
    cache = lm.programs.create_cache(4, 64, 1).parts[0].keys
    assert {shard.data.shape for shard in cache.addressable_shards} == {(num_layers // 2, 4, 64, 24)}


def described(walked: list[Instruction]) -> list[tuple[str | None, int, int]]:
    return sorted((found.collective, found.bytes, found.runs) for found in walked)


@pytest.mark.exhaustive
def test_adapters_of_streams_act_in_stages_and_on_padded_heads_as_on_one_device(single):
    """Nine heads and 63 features on two devices each: the same drafts are taken and refused."""
    one = single("llama", 4)
    streams = StreamsConfig(num_streams=3, num_layers=2)
    stream_params = init_streams(streams, one.lm.config, one.lm.backend, jax.random.key(0))
    blocks = jax.tree.map(jnp.asarray, random_adapters(one.lm.config, 2))
    adapted, idle = (
        Streams(params={**stream_params, "blocks": each}, num_layers=2, paths=read_tree("3.2.1"))
        for each in (blocks, jax.tree.map(jnp.zeros_like, blocks))
    )
    lm = one.on("data=2,tensor=2,pipeline=2")
    expected = check_identical(one.lm, one.asked, one.lm.resolve(adapted))
    assert check_identical(lm, one.asked, lm.resolve(adapted)) == expected
    assert check_identical(one.lm, one.asked, one.lm.resolve(idle)) != expected


@pytest.mark.exhaustive
def test_a_draft_model_whose_layers_do_not_divide_is_on_every_stage(single):
    one, split = single("llama"), Split("pipeline=2", "llama")
    config = replace(one.lm.config, num_layers=3)
    spec = parse_strategy("draft_model:num_draft_tokens=2")
    drafter = replace(spec, config=config, backend=one.lm.backend, params=random_params(config, seed=8))
    lm = one.on(split.mesh)
    resolved = lm.resolve(drafter)
    check_identical(lm, one.asked, resolved)
    assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(resolved.parameters)} == {True}
    check_communication(lm, split)


def test_layers_that_do_not_divide_are_refused():
    gemma2, llama = (Single(make_model(*of)) for of in (("gemma2", 4), ("llama", 3)))
    with pytest.raises(
        InvalidOption, match=r"^mesh: 4 layers, 2 cycles of 2 kinds, do not split evenly over pipeline=4"
    ):
        gemma2.on("pipeline=4")
    with pytest.raises(InvalidOption, match="3 layers do not split evenly over pipeline=2 devices: choose a div"):
        llama.on("pipeline=2")
