"""A decoder on Pallas kernels, interpreted, against the same one on plain XLA."""

import functools
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.cache.layouts import parse_layout
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cache_attention import Seen, attend_to_layer, attend_to_pages, attend_to_ring
from jaxinfer.ops.cache_write import Around, write_to_layer
from jaxinfer.ops.masks import causal_ancestors, visible_slots
from tests.parallel.devices import several
from tests.toys import TINY_LLAMA, float32_backend, random_params

INTERPRETED = choose_backend("float32", "cpu", kernels="interpret")
# As on a TPU, of which no lane is left empty.
PADDED = replace(INTERPRETED, lane_tile=128)
BY_REFERENCE = choose_backend("float32", "cpu", kernels="reference")
# Layers with windows beside layers without, and bounded scores.
WINDOWED = replace(
    TINY_LLAMA,
    attention_softcap=8.0,
    num_layers=3,
    layer_pattern=(LayerKind(Rope(1e4, TINY_LLAMA.head_dim), 200), *TINY_LLAMA.kinds),
)
TWO_LAYERS = replace(WINDOWED, num_layers=2)


@pytest.mark.parametrize(
    "config",
    [pytest.param(TINY_LLAMA, marks=pytest.mark.exhaustive), pytest.param(TWO_LAYERS, marks=pytest.mark.slow)],
    ids=["plain", "windows"],
)
def test_kernels_give_the_logits_of_plain_products(config):
    """A prompt of more tokens than a tree may have, and a short one."""
    params = random_params(config)
    texts = [np.random.default_rng(0).integers(2, 258, size).tolist() for size in (300, 5)]
    plain = LanguageModel(config, params, float32_backend()).logits(texts)
    found = LanguageModel(config, params, INTERPRETED).logits(texts)
    for row, text in enumerate(texts):
        one, other = np.asarray(plain[row, : len(text)]), np.asarray(found[row, : len(text)])
        assert one.std() > 1
        np.testing.assert_allclose(other, one, atol=1e-4 * one.std())


@pytest.mark.exhaustive
def test_kernels_read_rows_in_bytes_as_plain_products_do():
    """Of a prompt, of layers with windows, and of a tree in a ring and beside it."""
    by_xla = replace(PADDED, cache_dtype="int8", kernels="xla")
    by_kernels = replace(by_xla, kernels="interpret")
    params, text = random_params(TWO_LAYERS), np.random.default_rng(0).integers(2, 258, 300).tolist()
    plain, found = (np.asarray(LanguageModel(TWO_LAYERS, params, each).logits([text])) for each in (by_xla, by_kernels))
    np.testing.assert_allclose(found, plain, atol=1e-3 * plain.std())
    strategy = "lookahead:window=3,ngram=3,guesses=3"
    texts = [written(TWO_LAYERS, each, strategy, "dense") for each in (by_xla, by_kernels)]
    assert texts[0] == texts[1]


def written(config, backend, strategy, cache):
    """Let rings of 200 tokens and streaming caches of 184 begin anew while the longer text is written."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 258, size).tolist() for size in (195, 3)]
    sampling = [SamplingParams(), SamplingParams(temperature=0.9, seed=5)]
    lm = LanguageModel(config, random_params(config), backend, cache=parse_layout(cache))
    results = lm.generate(prompts, max_new_tokens=20, sampling=sampling, strategy=strategy)
    return [result.tokens for result in results]


@functools.cache
def plainly_written(cache):
    return written(TWO_LAYERS, float32_backend(), "autoregressive", cache)


STREAMING = "streaming:sinks=4,window=180"
WITH_PADDING = replace(float32_backend(), lane_tile=128)


@pytest.mark.parametrize(
    ("strategy", "cache", "backend"),
    [
        pytest.param("lookahead:window=3,ngram=3,guesses=3", "dense", PADDED, marks=pytest.mark.exhaustive),
        pytest.param("lookahead:window=3,ngram=3,guesses=3", "paged:page=32", PADDED, marks=pytest.mark.exhaustive),
        pytest.param("prompt_lookup:num_draft_tokens=4", STREAMING, PADDED, marks=pytest.mark.exhaustive),
        pytest.param("triforce:budget=32,chunk=8,window=16", "dense", WITH_PADDING, marks=pytest.mark.exhaustive),
    ],
    ids=["dense", "paged", "streaming", "retrieval"],
)
def test_strategies_write_the_plain_tokens_on_kernels_and_padded_lanes(strategy, cache, backend):
    assert written(TWO_LAYERS, backend, strategy, cache) == plainly_written(cache)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "cache", "backends"),
    [
        ("lookahead:window=3,ngram=3,guesses=3", "dense", (PADDED,)),
        ("prompt_lookup:num_draft_tokens=4", STREAMING, (PADDED, replace(BY_REFERENCE, lane_tile=128))),
        ("triforce:budget=32,chunk=8,window=16", "dense", (WITH_PADDING,)),
    ],
    ids=["dense", "streaming", "retrieval"],
)
def test_strategies_write_the_same_tokens_on_kernels_in_three_layers(strategy, cache, backends):
    plain, *others = (written(WINDOWED, backend, strategy, cache) for backend in (float32_backend(), *backends))
    assert others == [plain] * len(backends)


def test_a_tpu_attends_by_kernels_and_others_by_xla():
    assert choose_backend("bfloat16", "tpu").kernels == "pallas"
    assert {choose_backend("bfloat16", platform).kernels for platform in ("cpu", "gpu")} == {"xla"}
    assert jnp.dtype(INTERPRETED.cache_dtype) == jnp.float32


def test_lanes_of_one_tpu_are_whole_tiles():
    on_tpu = choose_backend("bfloat16", "tpu")
    assert [on_tpu.cache_lanes(heads, 64) for heads in (1, 3, 4)] == [128, 256, 256]
    assert replace(on_tpu, kv_shards=3).cache_lanes(3, 64) == 192
    assert float32_backend().cache_lanes(3, 64) == 192


def traced(backend, lanes=256, tokens=1, ring=False):
    """Return the program that writes so many tokens to a cache of two layers and attends to it."""

    def step(layer):
        cache = jnp.zeros((2, 1, 256, lanes), jnp.bfloat16)
        new = jnp.zeros((1, tokens, lanes // 64, 64), jnp.bfloat16)
        start_B, ancestors_1TT = jnp.zeros((1,), jnp.int32), causal_ancestors(tokens)[None]
        seen = Seen(start_B, ancestors_1TT, None, visible_slots(start_B, ancestors_1TT, 256))
        slots_BT = jnp.arange(tokens)[None]
        around = Around(start_B, None, 0) if ring else None
        held = write_to_layer(cache, cache, new, new, layer, slots_BT, backend, around)
        if ring:
            return attend_to_ring(new, *held, layer, seen, 0.125, backend, window=100)
        return attend_to_layer(new, *held, layer, seen, 0.125, backend)

    return str(jax.make_jaxpr(step)(0))


@pytest.mark.parametrize(
    ("lanes", "tokens", "is_kernel"), [(256, 1, True), (256, 128, True), (192, 1, False), (256, 129, False)]
)
@pytest.mark.parametrize("ring", [False, True], ids=["dense", "ring"])
def test_kernels_serve_whole_tiles_and_small_trees(lanes, tokens, is_kernel, ring):
    assert ("name=attend_cache" in traced(choose_backend("bfloat16", "tpu"), lanes, tokens, ring=ring)) == is_kernel


@pytest.mark.parametrize(("tokens", "is_kernel"), [(1, False), (2, True), (128, True)])
@pytest.mark.parametrize("ring", [False, True], ids=["dense", "ring"])
def test_several_tokens_are_written_by_a_kernel(tokens, is_kernel, ring):
    assert ("name=cache_write" in traced(choose_backend("bfloat16", "tpu"), 256, tokens, ring=ring)) == is_kernel


def traced_pages(backend, tokens, is_prompt=False, page_size=32, lanes=256):
    """Return the program that attends from so many tokens to pages."""

    def step(layer):
        pool, query = jnp.zeros((2, 9, page_size, lanes), jnp.bfloat16), jnp.zeros((1, tokens, 4, 64), jnp.bfloat16)
        start_B, ancestors_1TT = jnp.zeros((1,), jnp.int32), causal_ancestors(tokens)[None]
        table_BX = jnp.ones((1, 512 // page_size), jnp.int32)
        mask_BTS = visible_slots(start_B, ancestors_1TT, 512)
        seen = Seen(start_B, ancestors_1TT, start_B + tokens if is_prompt else None, mask_BTS)
        return attend_to_pages(query, pool, pool, layer, table_BX, seen, 0.125, backend, num_kv_heads=4)

    return str(jax.make_jaxpr(step)(0))


@pytest.mark.parametrize(
    ("options", "is_kernel"),
    [
        ({"tokens": 1}, True),
        ({"tokens": 128}, True),
        ({"tokens": 129}, False),
        ({"tokens": 300, "is_prompt": True}, True),
        ({"tokens": 1, "page_size": 8}, False),
    ],
)
def test_kernels_read_pages_for_small_trees_and_for_prompts(options, is_kernel):
    assert ("name=attend_pages" in traced_pages(choose_backend("bfloat16", "tpu"), **options)) == is_kernel


@pytest.mark.parametrize("kernels", ["xla", "reference"])
def test_every_operation_can_be_kept_from_kernels(kernels):
    for ring in (False, True):
        assert "pallas_call" not in traced(choose_backend("bfloat16", "tpu", kernels=kernels), 256, 8, ring=ring)
    assert "pallas_call" not in traced_pages(choose_backend("bfloat16", "tpu", kernels=kernels), 8)


def test_the_reference_does_not_round_weights_to_the_cache():
    """What defines correct multiplies in float32, where plain products take both sides in bfloat16."""
    products = [line for line in traced(choose_backend("bfloat16", "tpu", kernels="reference")).splitlines()
                if "dot_general" in line]  # fmt: skip
    assert products
    assert not any("bf16" in line for line in products)


def test_kernels_run_on_each_device_of_a_mesh():
    mesh = AbstractMesh((1, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    split = replace(choose_backend("bfloat16", "tpu"), kv_shards=2, mesh=mesh)
    program = traced(split, 256, 2)
    assert program.count("shard_map") == 2
    assert "bf16[2,1,256,128]" in program
    assert "pallas_call" not in traced(split, 128, 2)


ON_FOUR_DEVICES = """
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cache_attention import Seen, attend_to_layer, attend_to_pages, attend_to_ring
from jaxinfer.ops.cache_write import Around, write_to_layer
from jaxinfer.ops.masks import causal_ancestors, visible_slots

mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
whole = choose_backend("float32", "cpu", kernels="reference")
split = replace(whole, kernels="interpret", kv_shards=2, mesh=mesh)
rng = np.random.default_rng(0)
cache = [jnp.asarray(rng.normal(size=(2, 2, 256, 64)), jnp.float32) for _ in range(2)]
query, sink_query = (jnp.asarray(rng.normal(size=(2, 3, 4, 32)), jnp.float32) for _ in range(2))
new = [jnp.asarray(rng.normal(size=(2, 3, 2, 32)), jnp.float32) for _ in range(2)]
start_B, ancestors = jnp.array([100, 3]), causal_ancestors(3)[None]
seen = Seen(start_B, ancestors, jnp.array([3, 2]), visible_slots(start_B, ancestors, 256))
slots_BT = start_B[:, None] + jnp.arange(3)
pages = [jnp.asarray(rng.normal(size=(2, 20, 16, 64)), jnp.float32) for _ in range(2)]
table_BX = jnp.asarray(1 + rng.permutation(19)[:16].reshape(2, 8))
tree = Seen(start_B, jnp.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]) > 0, None, None)
tree = tree._replace(mask_BTS=visible_slots(start_B, tree.ancestors_BTT, 128))
chunk = seen._replace(mask_BTS=seen.mask_BTS[..., :128])

def paged(backend, query):
    # A row alone is on all devices.
    one = tree._replace(start_B=start_B[:1], mask_BTS=tree.mask_BTS[:1])
    options = {"window": 40, "softcap": 5.0, "num_kv_heads": 2}
    return (
        attend_to_pages(query, *pages, 1, table_BX, tree, 0.2, backend, **options),
        # The last token of the second row is padding, whose answer nobody reads.
        attend_to_pages(query, *pages, 0, table_BX, chunk, 0.2, backend, **options)[:, :2],
        attend_to_pages(query[:1], *pages, 0, table_BX[:1], one, 0.2, backend, **options),
    )

def step(backend, cache, new, query):
    held = write_to_layer(*cache, *new, 1, slots_BT, backend)
    ring = write_to_layer(*cache, *new, 1, slots_BT, backend, Around(start_B, None, 4))
    options = {"window": 90, "num_sinks": 4, "sink_query_BTNH": sink_query}
    return (
        held, ring, attend_to_layer(query, *held, 1, seen, 0.2, backend),
        attend_to_ring(query, *ring, 1, seen, 0.2, backend, **options), paged(backend, query),
    )

expected, found = (jax.jit(step, static_argnums=0)(each, cache, new, query) for each in (whole, split))
jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), expected, found)
print(found[2].sharding.spec)
"""


@pytest.mark.exhaustive
def test_each_device_of_a_mesh_works_on_its_own_heads_and_rows():
    child = subprocess.run([sys.executable, "-c", ON_FOUR_DEVICES], env=several(4), capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "tensor" in child.stdout
    assert "data" in child.stdout


@pytest.mark.parametrize(
    ("num_tokens", "start"),
    [pytest.param(16, 300, marks=pytest.mark.slow), pytest.param(256, 256, marks=pytest.mark.exhaustive)],
    ids=["step", "chunk"],
)
def test_with_fixed_rows_kernels_add_in_the_same_order_in_caches_of_all_lengths(num_tokens, start, monkeypatch):
    """Without them the blocks are as large as is fastest for a cache's length, here a quarter of it."""

    def tuned(kernel, shape):
        quarter = shape["S"] // 4
        return (
            {"block_slots": quarter} if num_tokens == 16 else dict.fromkeys(("block_q", "block_k", "block_s"), quarter)
        )

    for kernel in ("flash_decode", "flash_prefill"):
        monkeypatch.setattr(f"pallas_kernels.{kernel}.op.tuned_blocks", tuned)
    rng = np.random.default_rng(0)
    keys_LBSF, values_LBSF = rng.standard_normal((2, 1, 1, 2048, 128), np.float32)
    query_BTNH = jnp.asarray(rng.standard_normal((1, num_tokens, 4, 64), np.float32))
    start_B, ancestors_1TT = jnp.array([start], jnp.int32), causal_ancestors(num_tokens)[None]
    counts_B = jnp.array([num_tokens], jnp.int32) if num_tokens > 128 else None

    def mixed(backend, num_slots):
        seen = Seen(start_B, ancestors_1TT, counts_B, visible_slots(start_B, ancestors_1TT, num_slots))
        held = (jnp.asarray(buffer[:, :, :num_slots]) for buffer in (keys_LBSF, values_LBSF))
        return np.asarray(attend_to_layer(query_BTNH, *held, 0, seen, 0.125, backend)).tobytes()

    fixed = replace(INTERPRETED, step_rows=16)
    assert mixed(fixed, 512) == mixed(fixed, 2048)
    assert mixed(INTERPRETED, 512) != mixed(INTERPRETED, 2048)
