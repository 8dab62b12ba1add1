"""Windows that do not slide: kernels attend from the last multiple of the chunk's size on, and to nothing before."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_decode.op import flash_decode
from pallas_kernels.flash_prefill.op import attend_block, flash_prefill
from pallas_kernels.flash_prefill.reference import reference_prefill
from pallas_kernels.paged_decode.op import paged_decode
from pallas_kernels.paged_prefill.op import paged_prefill
from pallas_kernels.random_inputs import random_trees
from pallas_kernels.ring_decode.op import ring_decode
from pallas_kernels.tree_verify.op import tree_verify
from pallas_kernels.window import Chunk, Window, oldest
from tests.pallas_kernels.cached_attention import random_array, relative_error
from tests.pallas_kernels.tpu_programs import compile_for

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
SLOTS = 304


class Text(NamedTuple):
    """Keys and values ``[B, S, K*H]`` of whole texts, and queries ``[B, T, N, H]`` of new tokens from ``starts`` on."""

    query: Any
    keys: Any
    values: Any
    starts: np.ndarray
    trees: Any


def text(starts: tuple[int, ...], tokens: int, is_tree: bool = False) -> Text:
    rng = np.random.default_rng(tokens)
    query = random_array(rng, (len(starts), tokens, HEADS, HEAD_DIM), "float32")
    keys, values = (random_array(rng, (len(starts), SLOTS, KV_HEADS * HEAD_DIM), "float32") for _ in range(2))
    chain = np.tri(tokens, dtype=bool)[None].repeat(len(starts), axis=0)
    trees = np.asarray(random_trees(rng, len(starts), tokens)) if is_tree else chain
    return Text(query, keys, values, np.array(starts, np.int32), trees)


def by_definition(given: Text, size: int, slides: bool = False) -> np.ndarray:
    """Attend from each token to its ancestors and to all old tokens, of these to those of its own chunk.

    Or, if the window ``slides``, to the last so many.
    """
    results = np.zeros(given.query.shape)
    tokens = given.query.shape[1]
    for b, start in enumerate(given.starts):
        depth_T = given.trees[b].sum(axis=1) - 1
        position_S = np.concatenate([np.arange(start), start + depth_T])
        sees_TS = np.concatenate([np.ones((tokens, start), bool), given.trees[b]], axis=1)
        own_T1 = (start + depth_T)[:, None]
        sees_TS &= own_T1 - position_S < size if slides else own_T1 // size == position_S // size
        end = start + tokens
        keys, values = (each[b, :end].reshape(end, KV_HEADS, HEAD_DIM) for each in (given.keys, given.values))
        for n in range(HEADS):
            scores = given.query[b, :, n] @ keys[:, n // 2].T / HEAD_DIM**0.5
            powers = np.where(sees_TS, np.exp(scores), 0)
            results[b, :, n] = powers / powers.sum(axis=1, keepdims=True) @ values[:, n // 2]
    return results


def in_ring(given: Text, slots: int) -> tuple[Any, ...]:
    """Return the last tokens of each text where a ring has them; what it has overwritten or not seen is no number."""
    held = np.full((2, len(given.starts), slots, KV_HEADS * HEAD_DIM), np.nan, np.float32)
    for b, start in enumerate(given.starts):
        end = start + given.query.shape[1]
        at = np.arange(max(end - slots, 0), end)
        held[0, b, at % slots], held[1, b, at % slots] = given.keys[b, at], given.values[b, at]
    return held[0][None], held[1][None], np.int32(0)


def in_pages(given: Text) -> tuple[Any, ...]:
    pages = (each.reshape(1, -1, 16, KV_HEADS * HEAD_DIM) for each in (given.keys, given.values))
    return (*pages, np.int32(0), np.arange(len(given.starts) * SLOTS // 16, dtype=np.int32).reshape(-1, SLOTS // 16))


def in_slots(given: Text) -> tuple[Any, ...]:
    return given.keys[None], given.values[None], np.int32(0)


class Case(NamedTuple):
    """A kernel's call: what its arguments are between queries and starts, and its options."""

    given: Text
    size: int
    kernel: Callable[..., Any]
    held: Callable[[Text], tuple[Any, ...]] = in_slots
    options: Mapping[str, Any] = {}

    def run(self, window: Window) -> Any:
        kernel, given = self.kernel, self.given
        arguments = [given.query, *self.held(given), given.starts]
        if kernel in (tree_verify, ring_decode):
            arguments.append(given.trees)
        options = {"window": window, "interpret": True, **self.options}
        if self.kernel is paged_decode:
            return jax.jit(lambda trees, *others: kernel(*others, ancestors_BTT=trees, **options))(
                given.trees, *arguments
            )
        if not given.starts.any():  # known when it is compiled
            arguments = arguments[:-1]
        return jax.jit(functools.partial(kernel, **options))(*arguments)


SLOT_BLOCKS = {"block_slots": 128, "lane_parts": 1}
PREFILL_BLOCKS = {"block_q": 128, "block_k": 128, "block_s": 256}
# Sizes that are multiples of a block and that are not; trees that reach over the end of a chunk.
CASES = {
    "tree_verify": Case(text((30, 165), 24, is_tree=True), 36, tree_verify, options=SLOT_BLOCKS),
    "flash_prefill from zero": Case(
        text((0, 0), 300), 72, flash_prefill, options={"block_q": 256, "block_k": 128, "block_s": 256}
    ),
    "flash_prefill whole blocks": Case(text((0,), 300), 128, flash_prefill, options=PREFILL_BLOCKS),
    "flash_prefill": Case(text((3, 130), 140), 100, flash_prefill, options=PREFILL_BLOCKS),
    "flash_decode": Case(text((126, 255), 3), 128, flash_decode, options=SLOT_BLOCKS),
    "ring_decode": Case(
        text((30, 158, 240), 6, is_tree=True), 80, ring_decode, functools.partial(in_ring, slots=88), SLOT_BLOCKS
    ),
    "paged_decode": Case(text((45, 200), 20, is_tree=True), 50, paged_decode, in_pages, {"block_slots": 128}),
    "paged_prefill": Case(text((7, 131), 60), 48, paged_prefill, in_pages, {"block_q": 24, "block_slots": 128}),
}
ORDINARY = ("tree_verify",)


@pytest.mark.parametrize(
    "name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_kernels_attend_within_a_chunk(name):
    """Which is not what a window of that size comes to, that slides."""
    case = CASES[name]
    expected = by_definition(case.given, case.size)
    assert relative_error(case.run(Chunk(case.size)), expected) < 1e-5
    assert relative_error(by_definition(case.given, case.size, slides=True), expected) > 1e-2


@pytest.mark.exhaustive
def test_gradients_are_those_of_the_reference():
    given, size, kernel, *_ = CASES["flash_prefill"]
    arguments = given.query, given.keys[None], given.values[None]

    def gradients(attend: Callable[..., Any]) -> Any:
        def loss(query: Any, keys: Any, values: Any, starts: Any) -> Any:
            return jnp.sum(attend(query, keys, values, 0, starts, window=Chunk(size)) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arguments, given.starts)

    found = gradients(functools.partial(kernel, **PREFILL_BLOCKS, interpret=True))
    for one, expected in zip(found, gradients(reference_prefill)):
        assert relative_error(one, expected) < 1e-4


def test_a_chunk_begins_at_every_multiple_of_its_size():
    position = np.arange(40, dtype=np.int32)
    assert np.array_equal(oldest(Chunk(12), jnp.asarray(position)), position // 12 * 12)
    assert np.array_equal(oldest(12, jnp.asarray(position)), position - 11)


def test_blocks_that_do_not_know_their_place_take_no_chunks():
    block = jnp.zeros((1, 128, 2, 64))
    with pytest.raises(ValueError, match="do not say where chunks begin"):
        attend_block(block, block.reshape(1, 128, 128), block.reshape(1, 128, 128), 0, num_kv_heads=2, window=Chunk(8))


# Llama 4 on eight devices: five query heads of one key/value head. Rings and caches hold two chunks or so.
CHUNK = 8192
COMPILED = {
    "tree_verify": (tree_verify, 64, (4, 4, 16384, 128), (4, 64, 64)),
    "flash_decode": (flash_decode, 1, (4, 4, 16384, 128), None),
    "flash_prefill": (flash_prefill, 2048, (4, 1, 65536, 128), None),
    "ring_decode": (ring_decode, 8, (4, 4, 8208, 128), (4, 8, 8)),
}


def bytes_beside(query: Any) -> int:
    """Return what the queries, the result and their forms inside a kernel take."""
    return 4 * math.prod(query.shape) * 2 + (1 << 20)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("name", "chip"),
    [
        pytest.param("tree_verify", "v5e", marks=pytest.mark.slow),
        *(pytest.param(name, chip, marks=pytest.mark.exhaustive) for name in COMPILED for chip in ("v6e", "v5p")),
    ],
)
def test_chunks_compile_without_a_copy_of_the_cache(name, chip):
    kernel, tokens, held, trees = COMPILED[name]
    cache = jax.ShapeDtypeStruct(held, jnp.bfloat16)
    arguments = [jax.ShapeDtypeStruct((held[1], tokens, 5, 128), jnp.bfloat16), cache, cache, np.int32(2).reshape(())]
    arguments.append(np.full(held[1], CHUNK - 3, np.int32))
    if trees is not None:
        arguments.append(jax.ShapeDtypeStruct(trees, jnp.bool_))
    needed, _ = compile_for(chip, functools.partial(kernel, window=Chunk(CHUNK)), arguments)
    assert needed < 0.2 * np.prod(held[1:]) * 2 + bytes_beside(arguments[0])


@pytest.mark.tpu_compile
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "tokens"), [(paged_decode, 1), (paged_decode, 16), (paged_prefill, 512)])
def test_chunks_of_pages_compile_without_a_copy_of_the_pool(kernel, tokens):
    pool = jax.ShapeDtypeStruct((4, 513, 64, 128), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((4, tokens, 5, 128), jnp.bfloat16)
    table, starts = np.arange(1, 513, dtype=np.int32).reshape(4, 128), np.full(4, CHUNK - tokens, np.int32)
    arguments = query, pool, pool, np.int32(2).reshape(()), table, starts
    needed, _ = compile_for("v5e", functools.partial(kernel, window=Chunk(CHUNK // 2 - 100)), arguments)
    assert needed < 0.2 * np.prod(pool.shape[1:]) * 2 + bytes_beside(query)
