"""Models that are quantized on texts: nearer to themselves than by rounding, and decoded alike by every strategy."""

import os
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams, model_quantization
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_quantization import _Kept, _own_texts, quantize
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.decoder import Decoder, abstract_params, create_cache
from jaxinfer.models.stacking import stack_params
from jaxinfer.models.tapped_forward import tapped_forward
from jaxinfer.ops.few_bits.formats import INT8, Format
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.quantization.calibration import quantize_layers
from jaxinfer.quantization.methods import Gptq
from tests.toys import fable_tokens

# Texts of one shape, so that their passes are compiled once.
OWN = {"num_texts": 6, "text_tokens": 48}
ASKED = {**OWN, "calibration": fable_tokens(100)[:2000]}


@pytest.fixture(scope="module")
def toy(tiny_llama_folder):
    return jaxinfer.load(tiny_llama_folder())


@pytest.fixture(scope="module")
def made(toy):
    """Return the toy quantized on texts of its own."""
    return quantize(toy, "int4:group=32", **OWN)


def divergence(one, other, texts) -> float:
    """Return the mean KL divergence of what two models say next."""
    known, found = (
        logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for logits in (np.asarray(model.logits(texts), np.float64) for model in (one, other))
    )
    return float((np.exp(known) * (known - found)).sum(axis=-1).mean())


@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gptq", "awq", "awq+gptq")),
    ],
)
def test_a_quantized_model_is_nearer_to_itself_and_decodes_alike_by_every_strategy(toy, method):
    texts, done = [fable_tokens(200)[3000:3064]], []
    chosen = quantize(toy, "int4:group=32", method=method, advance=done.append, **ASKED)
    nearest = jaxinfer.load(toy.source.folder, weights="int4:group=32")
    assert done == [0, 1]
    assert 0 < divergence(toy, chosen, texts) < 0.8 * divergence(toy, nearest, texts)
    asked = {"max_new_tokens": 12, "sampling": SamplingParams(temperature=0.7, seed=3, logprobs=True)}
    plain, drafted = (chosen.generate([texts[0][:20]], strategy=name, **asked)[0]
                      for name in ("autoregressive", "prompt_lookup"))  # fmt: skip
    assert (plain.tokens, plain.logprobs) == (drafted.tokens, drafted.logprobs)


@pytest.mark.slow
def test_tables_are_in_the_groups_of_kernels_in_bytes(toy):
    chosen = quantize(toy, "int8:group=32", **ASKED)
    forms = {leaf.form for leaf in jax.tree.leaves(chosen.params, is_leaf=is_quantized) if is_quantized(leaf)}
    assert forms == {Format(8, 32)}


@pytest.mark.exhaustive
def test_a_layer_is_calibrated_on_what_the_layers_before_it_make_of_the_texts(toy):
    config, backend = toy.config, replace(toy.backend, scan_layers=False)
    decoder, seen = Decoder(config, backend), []
    params = stack_params(toy.params, abstract_params(config, backend))
    texts_NT = np.array(fable_tokens(10)[:96], np.int32).reshape(3, 32)

    class Record(Gptq):
        def choose(self, place, kernel, found):
            seen.append(found)
            return round_to_nearest(kernel, INT8)

    assert len(list(quantize_layers(decoder, params, texts_NT, Record(INT8)))) == 2
    assert len(seen) == 14
    lengths_N, positions_NT = jnp.full(3, 32, jnp.int32), jnp.tile(jnp.arange(32, dtype=jnp.int32), (3, 1))
    cache = create_cache(config, 3, 32, backend)
    placements = cache.place(jnp.zeros(3, jnp.int32), causal_ancestors(32)[None], lengths_N, 32)
    found, _ = tapped_forward(decoder, params, jnp.asarray(texts_NT), positions_NT, cache, placements, lengths_N)
    for layer in range(2):
        rows = np.asarray(dict(found)[f"blocks.layer_{layer}.attention_norm.result"]).reshape(-1, config.model_dim)
        expected = rows.T @ rows / len(rows)
        # Rounded to a byte, the layer before changes little.
        np.testing.assert_allclose(seen[7 * layer].squares_KK, expected, atol=0.02 * np.abs(expected).max())
        sizes = np.abs(rows).mean(axis=0)
        np.testing.assert_allclose(seen[7 * layer].sizes_K, sizes, atol=0.02 * sizes.max())


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_call_goes_on_where_it_was(toy, made, tmp_path, monkeypatch):
    def stop(layer):
        if layer == 0:
            raise Interrupted

    kept = tmp_path / "layers"
    with pytest.raises(Interrupted):
        quantize(toy, "int4:group=32", kept=kept, advance=stop, **OWN)
    assert sorted(path.name for path in kept.iterdir()) == ["layer_0", "texts_0"]
    choose, chosen = Gptq.choose, []
    monkeypatch.setattr(Gptq, "choose", lambda *given: chosen.append(given[1]) or choose(*given))
    monkeypatch.setattr(model_quantization, "_write_texts", lambda *arguments: pytest.fail("written again"))
    found = quantize(toy, "int4:group=32", kept=kept, **OWN)
    assert len(chosen) == 7
    jax.tree.map(np.testing.assert_array_equal, found.params, made.params)
    # What was made of other texts is made anew.
    chosen.clear()
    with pytest.raises(Interrupted):
        quantize(toy, "int4:group=32", kept=kept, advance=stop, **ASKED)
    assert len(chosen) == 7


@pytest.fixture
def looked(monkeypatch):
    """Return what is found of a layer by each call, which keeps one and is then interrupted."""
    found = []

    def interrupted(decoder, params, texts, method, layers, *rest):
        found.append(layers.read(0))
        layers.write(0, {"texts": texts})
        raise Interrupted

    monkeypatch.setattr(model_quantization, "quantize_layers", interrupted)
    return found


def interrupt(model, **options):
    with pytest.raises(Interrupted):
        quantize(model, "int4:group=32", **options)


def other_row(toy):
    params = jax.tree.map(lambda leaf: leaf, toy.params)
    kernel = params["blocks"]["layer_1"]["mlp"]["up"]
    kernel.update({name: value.at[1].mul(2) for name, value in kernel.items()})
    return toy.changed(params)


def other_theta(toy):
    config = replace(toy.config, layer_pattern=(LayerKind(Rope(500.0, toy.config.head_dim)),))
    return LanguageModel(config, toy.params, toy.backend, toy.source)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda toy: jaxinfer.load(toy.source.folder, dtype="bfloat16"), "parameters and dtypes and kernels"),
        (other_row, "parameters"),
        (other_theta, "configuration"),
    ],
)
def test_layers_of_another_model_are_made_anew(toy, looked, tmp_path, changed, reason):
    other, told = changed(toy), []
    # Their fingerprint does not tell them apart.
    assert other.fingerprint == toy.fingerprint
    for model in (toy, toy, other, other):
        interrupt(model, kept=tmp_path / "layers", notice=told.append, **ASKED)
    assert [layer is not None for layer in looked] == [False, True, False, True]
    assert told == [f"{tmp_path / 'layers'}: begun anew: made under other conditions ({reason})"]


def test_texts_that_a_model_has_written_outlive_an_interruption(toy, looked, tmp_path, monkeypatch):
    asked, wrote, written = {"num_texts": 6, "text_tokens": 8, "kept": tmp_path / "layers"}, [], []
    monkeypatch.setattr(model_quantization, "TEXTS_TOGETHER", 4)

    def write(model, seeds, length, most):
        if len(written) == most:
            raise Interrupted
        written.append(list(seeds))
        return np.array([[seed] * length for seed in seeds], np.int32)

    for most in (1, 2, 2):
        monkeypatch.setattr(model_quantization, "_write_texts", lambda *given, most=most: write(*given, most))
        interrupt(toy, wrote=wrote.append, **asked)
    assert written == [[0, 1, 2, 3], [4, 5]]
    assert wrote == [4, 4, 6, 4, 6]
    # The layer is of the same texts, whoever wrote them when.
    assert np.asarray(looked[1]["texts"]).tolist() == [[seed] * 8 for seed in range(6)]


def test_layers_are_kept_on_a_small_disk(toy, looked, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", lambda handle: SimpleNamespace(f_bavail=20, f_frsize=4096))
    for _ in range(2):
        interrupt(toy, kept=tmp_path / "layers", **ASKED)
    assert looked[1] is not None


def test_why_nothing_is_kept_is_told_once(toy, tmp_path):
    (tmp_path / "file").touch()
    told = []
    kept = _Kept.of(tmp_path / "file", dict, told.append)
    for layer in range(3):
        kept.made_also_of({"texts": "any"}).write(layer, {"kernel": np.ones(3)})
    assert told == [f"{tmp_path / 'file'}: not all is kept: Not a directory"]


@pytest.mark.exhaustive
def test_without_a_text_the_model_writes_its_own(toy, made):
    texts = _own_texts(toy, *OWN.values(), _Kept(), lambda count: None).tolist()
    # Drafters that were trained for the weights before they were rounded are found for these too.
    loaded = jaxinfer.load(toy.source.folder, weights="int4:group=32")
    assert 0 < divergence(toy, made, texts) < 0.9 * divergence(toy, loaded, texts)
    assert made.base_fingerprint == loaded.base_fingerprint == toy.fingerprint
    assert toy.fingerprint not in (made.fingerprint, loaded.fingerprint)


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ("int3", {}, "unknown weights 'int3'"),
        ("gguf", {}, "a method needs int8 or int4:group=64"),
        (
            "int4:group=32",
            {"method": "rtn"},
            "unknown method 'rtn'; use gptq, awq, awq\\+gptq, smoothquant, sparsegpt, magnitude, or",
        ),
        ("int4:group=32", {"num_texts": 0}, "num_texts=0 must be at least 1"),
        ("int4:group=32", {"text_tokens": True}, "text_tokens True is not a whole number"),
        ("int4:group=32", {"calibration": [1, 2, 3]}, "has 3 tokens, but a piece has 48: give a longer text"),
        ("int4:group=32", {"calibration": [1, 2, 9**99] * 40}, "29512665430652752148"),
        ("int4:group=128", {}, "do not divide into groups of 128"),
    ],
)
def test_mistakes_are_told(toy, weights, changes, message):
    with pytest.raises(InvalidOption, match=message):
        quantize(toy, weights, **{**ASKED, **changes})
