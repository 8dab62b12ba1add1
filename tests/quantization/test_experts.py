"""Mixtures that are quantized on texts: each expert by its own tokens, nearer to themselves than by rounding."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import Experts
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.few_bits import in_few_bits
from jaxinfer.ops.few_bits.formats import INT8, int4
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.quantization.experts import LEAST_TOKENS, Routed, num_rounded, quantize_experts
from jaxinfer.quantization.folding import part_of, scale_inputs
from jaxinfer.quantization.methods import Gptq
from tests.models.dense import dense_logits
from tests.quantization.test_model import Interrupted, divergence
from tests.toys import VOCAB_SIZE, fable_tokens, float32_backend, random_params

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False, "num_experts_per_tok": 2,
    "intermediate_size": 64, "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
CONFIG = {**_COMMON, "model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4}
CONFIG["norm_topk_prob"] = True
# What further mixtures compute: biases and a limit, inputs that are scaled, and a shared expert with a gate.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "swiglu_limit": 2.0, "head_dim": 16},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "head_dim": 16},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4},
}
FORM = int4(32, False)
ASKED: dict[str, Any] = {"calibration": fable_tokens(100)[:1280], "num_texts": 20, "text_tokens": 64}


@cache
def model_of(kind: str = "qwen3_moe", **changes: Any) -> jaxinfer.LanguageModel:
    config = {**CONFIG, **changes} if kind == "qwen3_moe" else {**_COMMON, "model_type": kind, **OTHERS[kind]}
    decoder = family_of(config).translate(config)
    return jaxinfer.LanguageModel(decoder, random_params(decoder, seed=1), float32_backend())


def rounded(lm: jaxinfer.LanguageModel) -> jaxinfer.LanguageModel:
    return jaxinfer.LanguageModel(lm.config, in_few_bits(lm.params, FORM, "toy"), lm.backend)


def check_is_nearer(lm: jaxinfer.LanguageModel, chosen: jaxinfer.LanguageModel, share: float) -> None:
    texts = [fable_tokens(200)[3000:3064]]
    assert 0 < divergence(lm, chosen, texts) < share * divergence(lm, rounded(lm), texts)


@pytest.mark.exhaustive
def test_a_mixture_is_nearer_to_itself_than_by_rounding_and_goes_on_after_an_interruption(tmp_path, monkeypatch):
    """On a text that it was not calibrated on."""

    def stop(layer: int) -> None:
        if layer == 0:
            raise Interrupted

    lm, said, places = model_of(), [], []
    with pytest.raises(Interrupted):
        jaxinfer.quantize(lm, "int4:group=32", kept=tmp_path, advance=stop, **ASKED)
    choose = Gptq.choose
    monkeypatch.setattr(Gptq, "choose", lambda *given: places.append(given[1]) or choose(*given))
    chosen = jaxinfer.quantize(lm, "int4:group=32", kept=tmp_path, notice=said.append, **ASKED)
    # Of the last layer alone: four of attention, and three of each expert.
    assert len(places) == 4 + 3 * 4
    assert said == [f"0 of 8 experts had fewer than {LEAST_TOKENS} of the calibration text's tokens: their weights "
                    "were rounded to the nearest"]  # fmt: skip
    stack = chosen.params["blocks"]["layer_0"]["mlp"]["experts"]["down"]
    assert stack.form == FORM
    assert stack.by_rows().codes.shape == (4, 64, 32)
    check_is_nearer(lm, chosen, 0.6)


@pytest.mark.parametrize(
    ("kind", "method", "share"),
    [("qwen3_moe", "awq", 0.95), *((kind, name, 0.8) for kind in OTHERS for name in ("gptq", "awq+gptq"))],
)
@pytest.mark.exhaustive
def test_every_method_and_kind_of_mixture_is_nearer_to_itself(kind, method, share):
    lm = model_of(kind)
    check_is_nearer(lm, jaxinfer.quantize(lm, "int4:group=32", method=method, **ASKED), share)


class Recorded(Gptq):
    """Rounds to bytes, and records what it was shown."""

    def __init__(self) -> None:
        super().__init__(INT8)
        object.__setattr__(self, "seen", [])

    def factors(self, kernels, seen):
        seen()
        (down,) = kernels
        return jnp.exp(jnp.linspace(-1, 1, down.shape[1]))

    def choose(self, place, kernel, seen):
        self.seen.append((place, seen))
        return round_to_nearest(kernel, INT8)


NUM_TOKENS, DIM, WIDTH = 300, 64, 64


def layer(*, biases: bool = False):
    """Return a layer of three experts, and tokens of which few go to the last; their numbers depend on each other."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.float32)  # noqa: E731
    mlp = {"experts": {"gate": draw(3, WIDTH, DIM), "up": draw(3, WIDTH, DIM), "down": draw(3, DIM, WIDTH)}}
    if biases:
        mlp["expert_biases"] = {"gate": draw(3, WIDTH), "up": draw(3, WIDTH), "down": draw(3, DIM)}
    chosen = np.stack([np.arange(NUM_TOKENS) % 2, np.where(np.arange(NUM_TOKENS) < LEAST_TOKENS - 1, 2, -1)], axis=1)
    chosen[chosen < 0] = 1 - chosen[chosen[:, 1] < 0, 0]
    weights = rng.uniform(0.2, 1, chosen.shape).astype(np.float32)
    inputs = rng.normal(size=(NUM_TOKENS, DIM)) @ (rng.normal(size=(DIM, DIM)) / np.arange(1, DIM + 1)[:, None])
    return mlp, Routed(inputs.astype(np.float32), chosen, weights)


def test_an_experts_results_change_less_than_by_rounding():
    """For tokens that it was not calibrated on, which are drawn alike; and where there are few it is rounded."""
    mlp, routed = layer()
    inputs, rest = routed.inputs_ND[:200], routed.inputs_ND[200:]
    calibrated = Routed(inputs, routed.chosen_NC[:200], routed.weights_NC[:200])
    method = Gptq(FORM)
    found, _ = quantize_experts(mlp, calibrated, Experts(3, 2, WIDTH), "silu", method)
    nearest = {"experts": {name: jax.vmap(method.nearest)(stack) for name, stack in mlp["experts"].items()}}
    for expert in range(3):
        plain, chosen, rounded = (
            _hidden(rest, expert, None, each) @ _kernel(each, "down", expert).T for each in (mlp, found, nearest)
        )
        missed, by_rounding = (np.square(each - plain).mean() for each in (chosen, rounded))
        assert missed == by_rounding if expert == 2 else missed < 0.5 * by_rounding


@pytest.mark.parametrize(
    ("biases", "options"),
    [
        (True, {}),
        pytest.param(True, {"limit": 1.0}, marks=pytest.mark.slow),
        pytest.param(False, {"scales_inputs": True}, marks=pytest.mark.slow),
    ],
)
def test_an_expert_is_shown_its_own_tokens_and_what_it_makes_of_them(biases, options):
    """And its results change by no more than rounding to bytes, whatever its inputs are scaled by."""
    mlp, routed = layer(biases=biases)
    method, experts = Recorded(), Experts(3, 2, WIDTH, **options)
    found, _ = quantize_experts(mlp, routed, experts, "silu", method)
    assert num_rounded(routed.counts(3)) == 1
    assert [place for place, _ in method.seen] == 2 * [("experts", name) for name in ("gate", "up", "down")]
    for expert in range(2):
        rows = np.concatenate(list(routed.rows_of(expert, scaled="scales_inputs" in options)))
        tokens, places = np.nonzero(routed.chosen_NC == expert)
        own = routed.inputs_ND[tokens]
        own = own * routed.weights_NC[tokens, places, None] if "scales_inputs" in options else own
        np.testing.assert_array_equal(rows[: len(own)], own)
        assert not rows[len(own) :].any()
        hidden = partial(_hidden, own, expert, experts.limit)
        shown = [seen for _, seen in method.seen[3 * expert : 3 * expert + 3]]
        for seen, inputs in zip(shown, (own, own, hidden(found))):
            np.testing.assert_allclose(seen.squares_KK, inputs.T @ inputs / len(own), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(seen.sizes_K, np.abs(inputs).mean(axis=0), rtol=1e-4)
            np.testing.assert_allclose(seen.most_K, np.abs(inputs).max(axis=0), rtol=1e-4)
        results = [hidden(each) @ _kernel(each, "down", expert).T for each in (mlp, found)]
        assert (results[1] - results[0]).std() < 0.03 * results[0].std()
        moved = np.abs(_kernel(found, "down", expert) - _kernel(mlp, "down", expert)).max()
        assert (moved > 0.1) == (experts.limit is None)
    for name, stack in found["experts"].items():
        alone = round_to_nearest(mlp["experts"][name][2], INT8)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda part: part[2], stack), alone)


def _kernel(mlp, name: str, expert: int) -> np.ndarray:
    stack = mlp["experts"][name]
    return np.asarray(stack.dequantize() if hasattr(stack, "dequantize") else stack)[expert]


def _hidden(rows: np.ndarray, expert: int, limit: float | None, mlp) -> np.ndarray:
    biases = mlp.get("expert_biases")
    gate, up = (
        rows @ _kernel(mlp, name, expert).T + (0 if biases is None else np.asarray(biases[name][expert]))
        for name in ("gate", "up")
    )
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
    return gate / (1 + np.exp(-gate)) * up


def test_scaled_inputs_of_experts_change_no_logits():
    """A router and the gate of a shared expert read the same norm."""
    config = model_of("qwen2_moe").config
    params, rng, seen = random_params(config), np.random.default_rng(1), []

    def choose(places, kernels):
        seen.append(["/".join(place[1:]) for place in places])
        (width,) = {kernel.shape[-1] for kernel in kernels}
        return jnp.asarray(np.exp(0.5 * rng.normal(size=width)), jnp.float32)

    blocks = {name: scale_inputs(config, block, choose) for name, block in params["blocks"].items()}
    wide = [f"{part}/{name}" for part in ("experts", "shared") for name in ("gate", "up")]
    assert seen == config.num_layers * [["query", "key", "value"], wide, ["output"], ["shared/down"]]
    plain, scaled = (
        dense_logits(config, {**params, "blocks": each}, [3, 1, 4, 1, 5]) for each in (params["blocks"], blocks)
    )
    np.testing.assert_allclose(scaled, plain, atol=5e-5 * np.abs(plain).max())
    for place in (("mlp", "experts", "up"), ("mlp", "router", "weights"), ("mlp", "shared_gate", "weights")):
        one, other = (np.asarray(part_of(each["layer_0"], place)) for each in (params["blocks"], blocks))
        assert np.abs(one - other).max() > 0.01


def test_what_experts_are_not_quantized_by_is_refused():
    with pytest.raises(InvalidOption, match="experts multiply rows as they are: use gptq or awq"):
        jaxinfer.quantize(model_of(), "int8", method="smoothquant", **ASKED)
    with pytest.raises(InvalidOption, match=r"experts.down: its rows of 96 weights do not divide into groups"):
        jaxinfer.quantize(model_of(moe_intermediate_size=96), "int4:group=64", **ASKED)
