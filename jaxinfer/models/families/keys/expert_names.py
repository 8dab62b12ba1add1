"""The tensor names that families with experts share."""

from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part, Source, TensorNames

_LAYER = "model.layers.{layer}."
_LINEARS: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def with_experts(
    config: DecoderConfig,
    names: TensorNames,
    *,
    mlp: str = "mlp",
    router: str = "gate.weight",
    linears: Mapping[str, str] = _LINEARS,
    shared: str = "mlp.shared_expert",
) -> TensorNames:
    """Return a dense model's names and those of its experts, each a tensor of its own or all of them in one.

    ``mlp`` is the layer's name in a block, ``router`` its router's, ``shared`` that of an expert that all tokens have.
    """
    experts = config.experts
    assert experts is not None
    inside = f"{_LAYER}{mlp}."
    block: dict[str, Source] = {"mlp.router.weights": f"{inside}{router}"}
    block |= single_matrices(config, inside, linears)
    for ours, theirs in _LINEARS.items() if experts.shared_dim else ():
        block[f"mlp.shared.{ours}.kernel"] = f"{_LAYER}{shared}.{theirs}.weight"
    if experts.shared_gate:
        block["mlp.shared_gate.weights"] = f"{_LAYER}{shared}_gate.weight"
    if experts.correction_bias:
        block["mlp.router.correction"] = f"{inside}gate.e_score_correction_bias"
    joined = joined_stacks(config, "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    single = single_stacks(config)
    if experts.shared_gate:  # a vector there
        single["mlp.shared_gate.weights"] = Part(f"{_LAYER}{shared}_gate.weight", shape=(config.model_dim,))
    return replace(names, block={**names.block, **block}, others=(joined, single))


def single_matrices(config: DecoderConfig, inside: str, linears: Mapping[str, str] = _LINEARS) -> dict[str, Source]:
    """Name a tensor for each kernel of each expert, after ``inside`` in a block."""
    count, *_ = _sizes(config)
    return {
        f"mlp.experts.{ours}": tuple(f"{inside}experts.{expert}.{theirs}.weight" for expert in range(count))
        for ours, theirs in linears.items()
    }


def joined_stacks(config: DecoderConfig, gate_up: str, down: str) -> dict[str, Source]:
    """Name two tensors ``[E, 2 F, D]`` and ``[E, D, F]`` in a block, the rows of gate before those of up."""
    count, width, model_dim = _sizes(config)
    shape, heads = (count, 2 * width, model_dim), (width, 2 * width)
    return {
        "mlp.experts.gate": Part(f"{_LAYER}{gate_up}", heads=heads, shape=shape),
        "mlp.experts.up": Part(f"{_LAYER}{gate_up}", width, heads=heads, shape=shape),
        "mlp.experts.down": Part(f"{_LAYER}{down}", shape=(count, model_dim, width)),
    }


def single_stacks(config: DecoderConfig) -> dict[str, Source]:
    """Name three tensors of all experts, as GGUF files have them."""
    count, width, model_dim = _sizes(config)
    wide, narrow = (count, width, model_dim), (count, model_dim, width)
    shapes = {"gate": wide, "up": wide, "down": narrow}
    return {
        f"mlp.experts.{ours}": Part(f"{_LAYER}mlp.experts.{theirs}.weight", shape=shapes[ours])
        for ours, theirs in _LINEARS.items()
    }


def transposed_stacks(config: DecoderConfig, gate_up: str, down: str) -> dict[str, Source]:
    """Name two tensors ``[E, D, 2 F]`` and ``[E, F, D]`` in a block, gate and up taking turns, and those of biases."""
    count, width, model_dim = _sizes(config)
    wide, narrow = (count, model_dim, 2 * width), (count, width, model_dim)
    kernels, biases = "mlp.experts", "mlp.expert_biases"
    block: dict[str, Source] = {
        f"{kernels}.down": Part(f"{_LAYER}{down}", transposed=True, shape=narrow, every=1),
        f"{biases}.down": f"{_LAYER}{down}_bias",
    }
    for first, ours in enumerate(("gate", "up")):
        block[f"{kernels}.{ours}"] = Part(f"{_LAYER}{gate_up}", first, transposed=True, shape=wide, every=2)
        block[f"{biases}.{ours}"] = Part(f"{_LAYER}{gate_up}_bias", first, shape=(count, 2 * width), every=2)
    return block


def halves_of_stacks(config: DecoderConfig, gate_up: str, down: str) -> dict[str, Source]:
    """Name two tensors ``[E, D, 2 F]`` and ``[E, F, D]``, the columns of gate before those of up."""
    count, width, model_dim = _sizes(config)
    wide = Part(gate_up, transposed=True, shape=(count, model_dim, 2 * width), every=1)
    return {
        "mlp.experts.gate": wide,
        "mlp.experts.up": replace(wide, first=width),
        "mlp.experts.down": Part(down, transposed=True, shape=(count, width, model_dim), every=1),
    }


def _sizes(config: DecoderConfig) -> tuple[int, int, int]:
    assert config.experts is not None
    return config.experts.num_experts, config.experts.ffn_dim, config.model_dim
