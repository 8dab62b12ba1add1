"""Every strategy's step compiles for one v5e chip at Llama-2-7B size, its cache updated where it lies."""

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.decoding.beam.state import BeamState, SearchRule, initial_beams
from jaxinfer.decoding.beam.step import run_beams
from jaxinfer.decoding.registry import STRATEGIES, parse_strategy
from jaxinfer.decoding.search.step import search_step
from jaxinfer.decoding.state import DecodeState, initial_state
from jaxinfer.decoding.strategies.dflash import DFlash
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.eagle import Eagle
from jaxinfer.decoding.strategies.mcts import TreeSearch
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.mtp import Mtp
from jaxinfer.decoding.strategies.streams import Streams
from jaxinfer.decoding.strategies.token_recycling import TokenRecycling
from jaxinfer.decoding.strategies.triforce import TriForce
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.decoding.trees.dynamic import Growth
from jaxinfer.decoding.trees.static import read_tree
from jaxinfer.grammar.table import TokenTable
from jaxinfer.models.decoder import Decoder, abstract_params, create_cache
from jaxinfer.models.drafters.dflash import abstract_dflash, dflash_for
from jaxinfer.models.drafters.eagle import init_eagle, shape_for
from jaxinfer.models.drafters.mtp import init_mtp
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.ops.backend import choose_backend
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import compile_programs
from jaxinfer.planning.strategies import planned_strategy
from jaxinfer.planning.topology import tensor_mesh, without_persistent_cache
from jaxinfer.sampling import SamplingParams, sampling_arrays
from tests.planning.buffers import largest_buffers
from tests.planning.models import LLAMA_2_7B, LLAMA_68M

pytestmark = pytest.mark.tpu_compile

BACKEND = choose_backend("bfloat16", platform="tpu")


def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def four_heads() -> dict:
    """Describe Medusa heads of one block each, over the model's own output matrix."""
    width = LLAMA_2_7B.model_dim
    block = {"kernel": bfloat16(width, width), "bias": bfloat16(width)}
    return {"heads": tuple({"blocks": (block,)} for _ in range(4))}


def streams() -> dict:
    """Describe three streams in the top four layers."""
    described = StreamsConfig(num_streams=3, num_layers=4, rank=8, exit_rank=8)
    return jax.eval_shape(lambda key: init_streams(described, LLAMA_2_7B, BACKEND, key), jax.random.key(0))


def eagle() -> dict:
    """Describe a drafter of EAGLE-3's published shape."""
    shape = shape_for(LLAMA_2_7B)
    return jax.eval_shape(lambda key: init_eagle(shape, 32000, key, "bfloat16"), jax.random.key(0))


def block_drafter() -> DFlash:
    """Describe a DFlash drafter of two layers, beside which there is room for a cache."""
    dflash = dflash_for(LLAMA_2_7B, num_layers=2, block_size=16)
    return replace(DFlash().shaped(dflash), backend=BACKEND, params=abstract_dflash(dflash, BACKEND))


def mtp_layer() -> dict:
    """Describe a layer for further tokens."""
    return jax.eval_shape(lambda key: init_mtp(LLAMA_2_7B, BACKEND, key), jax.random.key(0))


@cache
def shaped() -> dict[str, Strategy]:
    """Return those whose options name weights, or that are to be large here; every other is as its name alone says."""
    return {
        "auto": parse_strategy("auto:nodes=16"),
        "cascade": planned_strategy("cascade", LLAMA_2_7B, MeshConfig(), "bfloat16"),
        "draft_model": DraftModel(
            schedule="bass", config=LLAMA_68M, backend=BACKEND, params=abstract_params(LLAMA_68M, BACKEND)
        ),
        "lookahead": parse_strategy("lookahead:window=7,ngram=5,guesses=7"),
        "layerskip": parse_strategy("layerskip:exit_layer=8"),
        "medusa": Medusa(paths=read_tree("mc_sim_7b_63"), params=four_heads()),
        "medusa:tree=dynamic:64": Medusa(growth=Growth(64, 4), params=four_heads()),
        "mtp": Mtp(num_draft_tokens=3, params=mtp_layer(), layer=LLAMA_2_7B.num_layers),
        "triforce": parse_strategy("triforce:budget=512"),
        "triforce:drafter": TriForce(
            budget=512, config=LLAMA_68M, backend=BACKEND, params=abstract_params(LLAMA_68M, BACKEND)
        ),
        "eagle": Eagle(growth=Growth(16, 5), catch_up=6, shape=shape_for(LLAMA_2_7B), params=eagle()),
        "dflash": block_drafter(),
        "streams": Streams(paths=read_tree("4.2.1"), num_layers=4, keep_nodes=8, params=streams()),
        # The logits of 64 nodes, whose likeliest tokens it asks for, would be more than a twentieth of the cache.
        "token_recycling": TokenRecycling(growth=Growth(32, 6)),
    }


# What has a loop of its own is held below.
CASES = (*(name for name in STRATEGIES if name not in ("beam", "mcts")), "medusa:tree=dynamic:64", "triforce:drafter")


# In the ordinary run test_eight_chips compiles plain decoding and a given tree.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_step_copies_no_cache(name):
    """Temporaries stay under a twentieth of the cache, of which a copy would take half."""
    strategy = shaped().get(name) or parse_strategy(name)
    max_len = -(-(2048 + strategy.headroom) // 16) * 16
    # The weights and those in four bits are more than 16 GB.
    chip = "v6e:1x1" if name == "cascade" else "v5e:1x1"
    found = compile_programs(LLAMA_2_7B, chip, batch=1, max_len=max_len, prompt_tokens=None, strategy=strategy)[
        "decode"
    ]
    check_in_place(found.alias_bytes, found.temporary_bytes, found.cache_bytes, found.hlo)
    if name == "token_recycling":
        # Nor a step its table, whose parts alone have this shape; a call may lay it out anew, before its first step.
        steps, entry, _ = found.hlo.partition("\nENTRY ")
        assert entry
        assert len(re.findall(r"= [sf]32\[1,\d+,4096\]\S* dynamic-update-slice\(", steps)) == 3
        assert not re.search(r"= [sf]32\[1,\d+,4096\]\S* copy\(", steps)


@pytest.mark.exhaustive
def test_a_cache_in_bytes_is_half_as_large_and_stays_where_it_is():
    """A step and a prompt; scales and what fills their tiles are a thirtieth of this model's rows."""
    asked = {"batch": 1, "max_len": 2048, "prompt_tokens": 512}
    found = compile_programs(LLAMA_2_7B, "v5e:1x1", **asked, cache_dtype="int8")
    wide = 2 * 32 * 2048 * 4096 * 2
    for program in found.values():
        assert program.cache_bytes < 0.52 * wide
        check_in_place(program.alias_bytes, program.temporary_bytes, program.cache_bytes, program.hlo)
    assert "attend_cache" in found["decode"].hlo


def check_in_place(alias_bytes: int, temporary_bytes: int, cache_bytes: int, hlo: str) -> None:
    """Check that a cache is written where it lies and not copied; else name the largest buffers."""
    assert alias_bytes >= cache_bytes, largest_buffers(hlo)
    assert temporary_bytes < 0.05 * cache_bytes, largest_buffers(hlo)


@pytest.mark.exhaustive
def test_a_tree_with_a_grammar_takes_its_table_as_an_argument():
    """A model of one layer, as what a grammar adds comes after them; the cache and the table stay where they are."""
    width, rows, states, classes, vocab_size = 256, 8, 2048, 256, LLAMA_68M.vocab_size
    config = replace(LLAMA_68M, num_layers=1, model_dim=width, ffn_dim=512, num_heads=2, num_kv_heads=2, head_dim=128)
    heads = {"heads": ({"blocks": ({"kernel": bfloat16(width, width), "bias": bfloat16(width)},)},) * 2}
    table = TokenTable(*(np.zeros(shape, np.int32) for shape in (vocab_size, (states, classes), states)))
    asked = {"batch": rows, "max_len": 256, "prompt_tokens": None, "sampling": SamplingParams(grammar=table)}
    strategy = Medusa(paths=read_tree("2.2"), params=heads)
    found = compile_programs(config, "v5e:1x1", **asked, strategy=strategy)["decode"]
    assert found.alias_bytes >= found.cache_bytes
    arguments = found.hlo.partition("entry_computation_layout={")[2].partition(")->")[0]
    for described in (f"s16[{rows},{states},{classes}]", f"s16[{rows},{vocab_size}]", f"s32[{rows},{states}]"):
        assert described in arguments
    steps, entry, _ = found.hlo.partition("\nENTRY ")
    assert entry
    assert not re.search(rf"= s16\[{rows},{states},{classes}\]\S* (copy|fusion)\(", steps)
    assert not re.search(r" (infeed|outfeed|send|recv)\(|callback", found.hlo)


@pytest.mark.exhaustive
def test_a_step_of_beam_search_reorders_its_cache_layer_by_layer():
    """Rows change places, so that the cache is read and written; memory for one layer more is all that this takes."""
    width, num_slots = 2, 2048

    def build() -> tuple[SearchRule, BeamState]:
        cache = create_cache(LLAMA_2_7B, width, num_slots, BACKEND, headroom=1)
        sampling = sampling_arrays([SamplingParams()] * width, [0] * width, (2,), LLAMA_2_7B.vocab_size)
        limits_B = np.array([num_slots], np.int32)
        state = initial_beams([[1]], limits_B, limits_B, width, num_slots, cache, sampling, jnp.float32)
        return SearchRule(jnp.float32(1), jnp.bool_(False), jnp.bool_(False)), state

    rule, state = on_chip(jax.eval_shape(build))
    function = partial(run_beams, Decoder(LLAMA_2_7B, BACKEND), 2 * width)
    steps = on_chip(jax.ShapeDtypeStruct((), jnp.int32))
    check_compiled(function, rule, state, steps, state=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["gumbel", "puct"])
def test_a_tree_search_writes_its_nodes_where_they_lie(policy):
    """A batch of two: all simulations, and the continuation of each, run on one cache; the tree holds none of it."""
    batch, num_slots, strategy = 2, 2048, TreeSearch(simulations=32, depth=16, tokens=4, policy=policy)

    def build() -> tuple[DecodeState, Any]:
        cache = create_cache(LLAMA_2_7B, batch, num_slots, BACKEND, headroom=num_slots)
        sampling = sampling_arrays([SamplingParams()] * batch, [0] * batch, (2,), LLAMA_2_7B.vocab_size)
        state = initial_state([[1]] * batch, [1024] * batch, num_slots, 0, cache, sampling)
        return state, jnp.ones(batch, jnp.int32)

    state, lacks_B = on_chip(jax.eval_shape(build))
    function = partial(search_step, Decoder(LLAMA_2_7B, BACKEND), strategy, None)
    hlo = check_compiled(function, state, lacks_B, state=0)
    assert not re.search(r" (infeed|outfeed|send|recv)\(|callback", hlo)


def on_chip(structs: Any) -> Any:
    """Describe arrays on one v5e."""
    place = NamedSharding(tensor_mesh("v5e:1x1", 1), PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), structs)


def check_compiled(function: Any, *arguments: Any, state: int) -> str:
    """Compile a step of Llama-2-7B, check the cache of the state among its arguments, and return the program's text.

    The step takes parameters first, and returns the state alone, or first of several results.
    """
    place = NamedSharding(tensor_mesh("v5e:1x1", 1), PartitionSpec())
    params = on_chip(abstract_params(LLAMA_2_7B, BACKEND))
    formats = jax.tree.map(lambda _: Format(Layout.AUTO, place), params)
    with without_persistent_cache():
        jitted = jax.jit(
            function,
            donate_argnums=1 + state,
            in_shardings=(formats, *jax.tree.map(lambda _: place, arguments)),
            out_shardings=place,
        )
        compiled = jitted.trace(params, *arguments).lower(lowering_platforms=("tpu",)).compile()
    memory: Any = compiled.memory_analysis()
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[state].cache))
    hlo = compiled.as_text() or ""
    check_in_place(memory.alias_size_in_bytes, memory.temp_size_in_bytes, cache_bytes, hlo)
    return hlo
