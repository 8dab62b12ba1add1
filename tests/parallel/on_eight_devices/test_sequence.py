"""Tokens of a prompt and slots of a cache split over devices: logits and tokens are those of one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxinfer import LanguageModel, MeshConfig
from jaxinfer.cache.dense import create_dense_cache
from jaxinfer.cache.interface import Scores
from jaxinfer.decoding import programs
from jaxinfer.ops import ring_attention
from jaxinfer.ops.backend import Backend, choose_backend
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.planning.hlo.collectives import collective_kind
from tests.decoding.identity import check_identical
from tests.decoding.strategy_cases import CASES
from tests.parallel.on_eight_devices.meshes import MODELS, sent
from tests.parallel.on_eight_devices.test_exactness import check_reductions

MESHES = {
    str(mesh): mesh
    for mesh in (
        MeshConfig(sequence=2),
        MeshConfig(sequence=2, tensor=2),
        MeshConfig(sequence=4),
        MeshConfig(data=2, sequence=2, tensor=2),
    )
}
# Each strategy meets one mesh and one family, and each mesh every family.
COVER = [
    (strategy, list(MESHES)[row % len(MESHES)], MODELS[(row + row // len(MESHES)) % len(MODELS)])
    for row, strategy in enumerate(CASES)
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
    expected = one.lm.logits(one.asked.texts)
    for mesh in MESHES.values():
        check_logits(one.on(mesh), one.asked.texts, expected)


def check_logits(lm: LanguageModel, texts, expected) -> None:
    expected, found = np.asarray(expected), np.asarray(lm.logits(texts))
    for row, text in enumerate(texts):
        error = np.abs(found[row, : len(text)] - expected[row, : len(text)]).max()
        assert error <= 1e-5 * expected.std()


@pytest.mark.parametrize(("strategy", "mesh", "model"), COVER)
def test_tokens_are_those_of_one_device(single, strategy, mesh, model):
    check_tokens(single(model), strategy, mesh, model)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "mesh", "model"), REST)
def test_all_tokens_are_those_of_one_device(single, strategy, mesh, model):
    check_tokens(single(model), strategy, mesh, model)


def check_tokens(one, strategy: str, mesh: str, model: str) -> None:
    """Check a strategy's tokens; prefill sends keys around a ring, decode no part of the cache."""
    lm = one.on(MESHES[mesh])
    fitted = CASES[strategy].strategy(MODELS.index(model), one.lm, one.asked.texts)
    seen = check_identical(lm, one.asked, lm.resolve(fitted))
    assert not fitted.max_depth or seen["deep"] > 0
    for key, compiled in lm.programs._compiled.items():
        if key[0][0] == "decode" and "triforce" not in strategy:
            check_reductions(compiled)
        if key[0][0] == "prefill" and model != "gemma2":
            assert "collective-permute" in {collective_kind(line.opcode) for line in sent(compiled.as_text())}


def test_beam_search_keeps_the_texts_of_one_device(single):
    one = single("llama")
    prompts = [list(request.prompt) for request in one.asked.requests]
    asked = {"max_new_tokens": 12, "strategy": "beam:width=3,n=2"}
    expected = one.lm.generate(prompts, **asked)
    found = one.on(MESHES["sequence=2,tensor=2"]).generate(prompts, **asked)
    assert [result.tokens for result in found] == [result.tokens for result in expected]


@pytest.mark.parametrize(("model", "mesh"), [("gemma2", MeshConfig(sequence=4)), ("llama", MeshConfig(sequence=3))])
def test_what_does_not_go_around_a_ring_is_prefilled_chunk_by_chunk(single, model, mesh, monkeypatch):
    """Layers with a window keep rings of slots of their own; three devices have no six parts of 128 tokens."""
    monkeypatch.setattr(programs, "PREFILL_CHUNK", 32)
    one = single(model)
    check_logits(one.on(mesh), one.asked.texts, one.lm.logits(one.asked.texts))


@pytest.mark.parametrize(("num_devices", "window", "softcap"), [(2, 7, None), (3, 20, 3.0), (8, None, None)])
def test_a_ring_attends_to_what_one_device_attends_to(num_devices, window, softcap, monkeypatch):
    monkeypatch.setattr(ring_attention, "_QUERY_BLOCK", 4)
    backend = choose_backend("float32", platform="cpu")
    check_ring(split(backend, num_devices), backend, 8 * 2 * num_devices, 8, window, softcap)


def test_a_ring_of_kernels_attends_to_what_one_device_attends_to():
    backend = choose_backend("float32", platform="cpu", kernels="interpret")
    check_ring(split(backend, 2), choose_backend("float32", platform="cpu"), 4 * 128, 64, 150, None)


def split(backend: Backend, num_devices: int) -> Backend:
    mesh = MeshConfig(sequence=num_devices).build(jax.devices()[:num_devices])
    return replace(backend, mesh=mesh)


def check_ring(split: Backend, whole: Backend, num_tokens: int, head_dim: int, window, softcap) -> None:
    """Compare output and cache of a layer of grouped heads; slots past the prompt are left over on every device."""
    rng = np.random.default_rng(3)
    query, keys, values = (
        jnp.asarray(rng.normal(size=(2, num_tokens, heads, head_dim)), jnp.float32) for heads in (4, 2, 2)
    )
    results = []
    for backend in (whole, split):
        cache = create_dense_cache(2, 2, num_tokens + 40, 2 * head_dim, backend, window)

        def attend(*heads, cache=cache, backend=backend):
            start_B, counts_B = jnp.zeros(2, jnp.int32), jnp.full(2, num_tokens, jnp.int32)
            placement = cache.place(start_B, causal_ancestors(num_tokens)[None], counts_B, num_tokens)
            if backend is split:
                order_T = ring_attention.ring_order(num_tokens, backend)
                placement = placement._replace(seen=placement.seen._replace(order_T=jnp.asarray(order_T)))
                heads = [each[:, order_T] for each in heads]
            mixed, cache = cache.attend(1, placement, *heads, Scores(head_dim**-0.5, softcap), backend)
            if backend is split:
                mixed = ring_attention.in_text_order(mixed.reshape(2, num_tokens, -1), backend).reshape(mixed.shape)
            return mixed, cache

        results.append(jax.jit(attend)(query, keys, values))
    (expected, plain), (found, around) = results
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    assert around.keys.shape[2] % split.slot_shards == 0
    for ours, theirs in ((around.keys, plain.keys), (around.values, plain.values)):
        np.testing.assert_array_equal(ours[:, :, :num_tokens], theirs[:, :, :num_tokens])


def test_every_device_holds_its_own_slots_and_a_window_has_none(single):
    """Of 100 slots each of three devices has as many, in whole tiles; one stage has all layers."""
    gemma2 = single("gemma2").on(MeshConfig(sequence=3))
    ring, dense = sorted(gemma2.programs.create_cache(2, 100, 4).parts, key=lambda part: part.keys.shape[2])
    assert dense.keys.sharding.spec == PartitionSpec("pipeline", "data", "sequence", "tensor")
    assert dense.keys.shape[2] == 3 * 48
    assert dense.keys.addressable_shards[0].data.shape[2] == 48
    assert ring.keys.addressable_shards[0].data.shape == ring.keys.shape
