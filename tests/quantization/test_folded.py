"""Adapters change a model into which factors were folded as they change the model before, saved and loaded too."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel
from jaxinfer.checkpoint.adapters.other_tensors import PREFIX
from jaxinfer.checkpoint.convert import convert
from jaxinfer.checkpoint.drafters.streams import write_streams
from jaxinfer.checkpoint.orbax import marker as orbax_marker
from jaxinfer.errors import InvalidOption
from jaxinfer.models.adapters import adapted
from jaxinfer.models.drafters.streams import StreamsConfig, init_streams
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.folded import Folded, folded_adapters, joined, with_factors
from jaxinfer.ops.few_bits.formats import INT8
from jaxinfer.quantization.experts import Routed, quantize_experts
from jaxinfer.quantization.folding import scale_inputs
from jaxinfer.quantization.methods import Gptq
from tests.checkpoint.adapters.test_experts import WITH_SHARED, save
from tests.quantization.test_folding import BIASES, CONFIG
from tests.toy_adapters import edit_adapter, random_lora, with_magnitudes, write_adapter
from tests.toys import fable_tokens, float32_backend, random_params
from train.model.lora import save_lora

TEXT = [[3, 1, 4, 1, 5, 9, 2, 6]]
# What differs from a Llama with grouped queries.
CASES = {
    "own values and biases": {"num_kv_heads": 4, **BIASES},
    "one norm for both": {"block": "parallel", "norm": "rms_plus_one"},
}


def folded_blocks(config, blocks, seed: int = 1):
    """Return blocks with factors folded into them that are far from 1."""
    rng = np.random.default_rng(seed)

    def choose(places, kernels):
        return jnp.asarray(np.exp(rng.normal(size=kernels[0].shape[-1])), jnp.float32)

    return [scale_inputs(config, blocks[f"layer_{layer}"], choose) for layer in range(config.num_layers)]


def fold(lm, seed: int = 1):
    """Return a model with factors folded into it."""
    blocks = folded_blocks(lm.config, lm.params["blocks"], seed)
    plain = {f"layer_{layer}": {**block} for layer, block in enumerate(blocks)}
    for block in plain.values():
        del block["folded"]
    return lm.changed({**lm.params, "blocks": plain}, folded=Folded.of(blocks))


def pair_of(config, seed: int = 0):
    """Return a model in float32, and the same one folded."""
    lm = LanguageModel(config, random_params(config, seed), float32_backend())
    return lm, fold(lm)


def check_same(lm, folded, adapter) -> None:
    """Check that an adapter changes two models alike."""
    plain, adapted, found = (np.asarray(model.logits(TEXT, adapter=name)) for model, name in
                             ((lm, None), (lm, adapter), (folded, adapter)))  # fmt: skip
    assert np.abs(adapted - plain).max() > 0.1
    np.testing.assert_allclose(found, adapted, atol=1e-4 * np.abs(adapted).max())


def everything(config):
    """Let an adapter of a Llama have magnitudes, and norms and biases of its own; see `edit_adapter`."""

    def edit(settings, tensors):
        with_magnitudes(settings, tensors)
        rng = np.random.default_rng(5)
        settings |= {"bias": "all", "modules_to_save": ["input_layernorm"], "lora_bias": True}
        for name in [name for name in tensors if name.endswith("lora_B.weight")]:
            tensors[name.replace("lora_B.weight", "lora_B.bias")] = rng.normal(size=len(tensors[name]))
        for layer in range(config.num_layers):
            inside = f"{PREFIX}model.layers.{layer}."
            norms = [f"{inside}input_layernorm.weight"]
            biases = [f"{inside}self_attn.v_proj.bias", f"{inside}mlp.up_proj.bias"] if config.qkv_bias else []
            for name in (*norms, *biases):
                size = config.ffn_dim if "up_proj" in name else config.model_dim
                tensors[name] = 1 + rng.normal(size=size)
        for name, values in tensors.items():
            tensors[name] = values.astype(np.float32)

    return edit


@pytest.mark.parametrize("name", ["own values and biases", pytest.param("one norm for both", marks=pytest.mark.slow)])
def test_an_adapter_changes_a_folded_model_as_the_model_before(tmp_path, name):
    config = replace(family_of(CONFIG).translate(CONFIG), **CASES[name])
    lm, folded = pair_of(config)
    plain, whole = write_adapter(tmp_path / "plain", config), write_adapter(tmp_path / "whole", config, seed=3)
    edit_adapter(whole, everything(config))
    for model in (lm, folded):
        model.load_adapter("plain", plain)
        model.load_adapter("whole", whole)
    check_same(lm, folded, "plain")
    check_same(lm, folded, "whole")
    with pytest.raises(InvalidOption, match=r"may have folded factors into its weights.*merge it into that"):
        folded.merge_adapter("plain")


def test_what_was_folded_is_saved_copied_cut_and_loaded_with_any_weights(tiny_llama_folder, tmp_path):
    lm = jaxinfer.load(tiny_llama_folder(), dtype="float32", scan_layers=False)
    folded, adapter = fold(lm), write_adapter(tmp_path / "adapter", lm.config)
    saved = folded.save(tmp_path / "saved")
    copy = convert(saved, tmp_path / "copy")
    assert (copy / "jaxinfer.json").read_bytes() == (saved / "jaxinfer.json").read_bytes()
    found = jaxinfer.load(copy)
    for model in (lm, found):
        model.load_adapter("x", adapter)
    check_same(lm, found, "x")
    with pytest.raises(InvalidOption, match=r"may have folded factors into its weights.*merge it into that"):
        convert(saved, tmp_path / "merged", adapter=adapter)
    rounded = jaxinfer.load(convert(saved, tmp_path / "cut", layers=1), weights="int8")
    assert {name.partition(".")[0] for name in rounded.folded.factors} == {"0"}


def test_what_is_folded_twice_has_the_products_of_both_factors():
    one, other = (
        Folded({"0.mlp.down": np.full(2, 3.0)}),
        Folded({"0.mlp.down": np.full(2, 5.0), "1.mlp.down": np.ones(2)}),
    )
    both = joined(one, other)
    assert {name: value[0] for name, value in both.factors.items()} == {"0.mlp.down": 15.0, "1.mlp.down": 1.0}
    assert joined(one, Folded(None)).factors is None
    assert joined(None, other) is other
    assert joined(one, None) is one


def test_a_folder_that_does_not_say_what_was_folded_takes_no_adapter(tiny_llama_folder, tmp_path):
    source = tiny_llama_folder()
    lm = jaxinfer.load(source, weights="int8")
    adapter, folder = write_adapter(tmp_path / "adapter", lm.config), lm.save(tmp_path / "saved")
    jaxinfer.load(folder).load_adapter("x", adapter)
    path = folder / "jaxinfer.json"
    marker, config = json.loads(path.read_text()), json.loads((folder / "config.json").read_text())
    assert (marker["version"], marker.pop("folded")) == (3, [])
    few_bits = {key: marker[key] for key in ("forms", "rounded_from")}
    marker |= {"version": 2, "digest": orbax_marker._digest(config, marker["tensors"], few_bits)}
    path.write_text(json.dumps(marker))
    for found in (folder, convert(folder, tmp_path / "copy"), convert(folder, tmp_path / "wide", dtype="float32")):
        with pytest.raises(InvalidOption, match=r"adapter 'x': .* was saved without the factors.*quantize .* again"):
            jaxinfer.load(found).load_adapter("x", adapter)


class AsTheyAre(Gptq):
    """Folds random factors into experts, and rounds nothing."""

    def factors(self, kernels, seen):
        return jnp.asarray(np.exp(np.random.default_rng(4).normal(size=kernels[0].shape[-1])), jnp.float32)

    def choose(self, place, kernel, seen):
        return kernel

    def nearest(self, kernel):
        return kernel


def fold_experts(lm):
    """Return a mixture with factors folded into it, those of experts' down too; the last expert saw too little."""
    config, blocks = lm.config, folded_blocks(lm.config, lm.params["blocks"])
    rng, experts = np.random.default_rng(0), lm.config.experts
    chosen = np.repeat(np.arange(experts.num_experts), [*[40] * (experts.num_experts - 1), 3])[:, None]
    routed = Routed(rng.normal(size=(len(chosen), config.model_dim)), chosen, np.ones(chosen.shape))
    for layer, block in enumerate(blocks):
        if config.sparse_layers[layer]:
            mlp, factors = quantize_experts(block["mlp"], routed, experts, config.activation, AsTheyAre(INT8))
            assert (factors[-1] == 1).all()
            assert factors[0].std() > 0.1
            blocks[layer] = with_factors({**block, "mlp": mlp}, [("mlp", "experts", "down")], factors)
    params = {f"layer_{layer}": {**block} for layer, block in enumerate(blocks)}
    for block in params.values():
        del block["folded"]
    return lm.changed({**lm.params, "blocks": params}, folded=Folded.of(blocks))


@pytest.mark.slow
def test_an_adapter_of_routers_experts_and_shared_experts_changes_a_folded_mixture_as_it_was(tmp_path):
    config = family_of(WITH_SHARED).translate(WITH_SHARED)
    lm = LanguageModel(config, random_params(config), float32_backend())
    folded = fold_experts(lm)
    np.testing.assert_allclose(folded.logits(TEXT), lm.logits(TEXT), atol=1e-4)
    wide, narrow = ("gate_proj", "up_proj"), "down_proj"
    sizes = {"model.layers.0.mlp.": 40, "model.layers.1.mlp.shared_expert.": 16}
    sizes |= {f"model.layers.1.mlp.experts.{expert}.": 24 for expert in range(4)}
    modules = {f"{module}{name}": (size, 32) for module, size in sizes.items() for name in wide}
    modules |= {f"{module}{narrow}": (32, size) for module, size in sizes.items()}
    modules |= {"model.layers.1.mlp.gate": (4, 32), "model.layers.1.mlp.shared_expert_gate": (1, 32)}
    adapter = save(tmp_path / "adapter", modules, 4, [*wide, narrow, "mlp.gate", "shared_expert_gate"])
    for model in (lm, folded):
        model.load_adapter("x", adapter)
    check_same(lm, folded, "x")


def test_adapters_that_were_trained_on_a_folded_model_are_written_for_the_model_before(tmp_path):
    config = family_of(CONFIG).translate(CONFIG)
    _, folded = pair_of(config)
    lora = random_lora(config, seed=2, rank=3)
    folder = save_lora(tmp_path / "lora", config, lora, alpha=3.0, folded=folded.folded)
    folded.load_adapter("x", folder)
    found = folded.loaded_adapters.params["adapters"]["blocks"]
    for layer in range(config.num_layers):
        for part, name in (("attention", "query"), ("attention", "output"), ("mlp", "up"), ("mlp", "down")):
            for each in ("down", "up"):
                own = lora[part][name][each][layer]
                expected = own if each == "down" else own.T
                values = np.asarray(found[f"layer_{layer}"][part][name][each])[0, :3]
                np.testing.assert_allclose(values, expected, rtol=1e-4)


def test_streams_that_were_trained_on_the_model_before_are_folded(tmp_path):
    config = family_of(CONFIG).translate(CONFIG)
    _, folded = pair_of(config)
    streams = StreamsConfig(num_streams=2, num_layers=1, rank=4, exit_rank=4, adapter_rank=3)
    params = init_streams(streams, config, folded.backend, jax.random.key(0))
    params["blocks"] = jax.tree.map(jnp.ones_like, params["blocks"])
    write_streams(tmp_path / "streams", streams, params, config)
    found = folded.resolve(f"streams:heads={tmp_path / 'streams'},tree=chain:2").params["blocks"]
    expected = folded_adapters(params["blocks"], folded.folded, 1)
    assert np.std(expected["mlp"]["down"]["adapter"]["down"]) > 0.1
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_adapters_of_the_last_layers_are_folded_and_led_back():
    config = family_of(CONFIG).translate(CONFIG)
    lm, folded = pair_of(config)
    lora = random_lora(config, seed=2, rank=3)
    last = jax.tree.map(lambda leaf: jnp.asarray(leaf[1:]), lora)
    adapters = {part: {name: {"adapter": pair} for name, pair in node.items()} for part, node in last.items()}
    changed = folded_adapters(adapters, folded.folded, 1)
    back = folded_adapters(changed, folded.folded, 1, power=-1)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5), back, adapters)

    def with_last(params, adapters):
        blocks = params["blocks"]
        return {**params, "blocks": {**blocks, "layer_1": adapted(blocks["layer_1"], adapters, 0)}}

    plain, found = (model.changed(with_last(model.params, own)).logits(TEXT)
                    for model, own in ((lm, adapters), (folded, changed)))  # fmt: skip
    assert np.abs(plain - lm.logits(TEXT)).max() > 0.1
    np.testing.assert_allclose(found, plain, atol=1e-4)


@pytest.mark.parametrize(
    "method",
    [pytest.param("smoothquant", marks=pytest.mark.slow), pytest.param("awq", marks=pytest.mark.exhaustive)],
)
def test_a_model_that_a_method_made_has_its_factors_also_after_an_interruption(tiny_llama_folder, tmp_path, method):
    lm = jaxinfer.load(tiny_llama_folder(), dtype="float32")
    asked = {"calibration": fable_tokens(100)[:960], "num_texts": 6, "text_tokens": 48, "kept": tmp_path / "kept"}
    made = [jaxinfer.quantize(lm, "int8", method=method, **asked).save(tmp_path / name) for name in ("one", "two")]
    adapter = write_adapter(tmp_path / "adapter", lm.config)
    lm.load_adapter("x", adapter)
    for folder in made:
        found = jaxinfer.load(folder)
        found.load_adapter("x", adapter)
        texts = [fable_tokens(200)[3000:3064]]
        one, other = (model.logits(texts, adapter="x") for model in (lm, found))
        assert np.mean(np.argmax(one, -1) == np.argmax(other, -1)) > 0.85
        assert np.std(np.asarray(other) - np.asarray(one)) < 0.2 * np.std(np.asarray(one))
