"""Low-rank adapters for a decoder's kernels (LoRA, Hu et al., 2106.09685): drawn, applied, merged, saved.

Adapters are a separate tree, shaped like the blocks' parameters: ``{"down": [R, in], "up": [out, R]}`` for each linear
layer, stacked if its kernel is. ``down`` starts random and ``up`` at zero, so training starts at the base.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.checkpoint.adapters.peft_folder import PREFIX, WEIGHTS
from jaxinfer.checkpoint.adapters.settings import CONFIG
from jaxinfer.errors import InvalidOption
from jaxinfer.models.adapters import ADAPTER
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.folded import Folded
from jaxinfer.models.layers import BLOCKS, KERNEL, TRANSPOSED_KERNEL, locate
from jaxinfer.notation import Params


def init_lora(params: Params, rank: int, key: jax.Array) -> Params:
    """Draw adapters in float32 for every linear layer of the blocks."""
    counter = iter(range(1 << 30))

    def draw(layer: Params, _: Any) -> Params:
        *stack, count_out, count_in = _shape(layer)
        deviation = 1 / math.sqrt(count_in)
        down = deviation * jax.random.normal(jax.random.fold_in(key, next(counter)), (*stack, rank, count_in))
        return {"down": down, "up": jnp.zeros((*stack, count_out, rank))}

    return _map_layers(params[BLOCKS], None, draw)


def with_lora(params: Params, lora: Params, scale: float) -> Params:
    """Return parameters whose linear layers add their adapters' output, times ``scale`` (LoRA's alpha / rank)."""

    def add(layer: Params, adapter: Params) -> Params:
        return {**layer, ADAPTER: {"down": adapter["down"], "up": adapter["up"] * scale}}

    return {**params, BLOCKS: _map_layers(params[BLOCKS], lora, add, keep=True)}


def merge_lora(params: Params, lora: Params, scale: float) -> Params:
    """Return plain parameters that compute the same: ``kernel + scale * up down``, rounded once."""

    def merge(layer: Params, adapter: Params) -> Params:
        name = _kernel_name(layer)
        kernel = jnp.asarray(layer[name])
        added = jnp.matmul(adapter["up"] * scale, adapter["down"], precision=jax.lax.Precision.HIGHEST)
        added = added.swapaxes(-1, -2) if name == TRANSPOSED_KERNEL else added
        return {**layer, name: (kernel.astype(jnp.float32) + added).astype(kernel.dtype)}

    return {**params, BLOCKS: _map_layers(params[BLOCKS], lora, merge, keep=True)}


def _map_layers(
    node: Mapping[str, Any], adapters: Any, function: Callable[[Any, Any], Params], keep: bool = False
) -> dict[str, Any]:
    """Apply a function to every linear layer and its adapter; other parameters are kept unchanged, or dropped."""
    mapped: dict[str, Any] = {}
    for name, value in node.items():
        if not isinstance(value, Mapping):
            if keep:
                mapped[name] = value
            continue
        own = None if adapters is None else adapters.get(name)
        if KERNEL in value or TRANSPOSED_KERNEL in value:
            mapped[name] = function(value, own) if own is not None or adapters is None else value
        elif below := _map_layers(value, own if adapters is None else own or {}, function, keep):
            mapped[name] = below
    return mapped


def _kernel_name(layer: Params) -> str:
    return KERNEL if KERNEL in layer else TRANSPOSED_KERNEL


def _shape(layer: Params) -> tuple[int, ...]:
    """Return the shape of a layer's kernel as ``[..., out, in]``."""
    name = _kernel_name(layer)
    *stack, first, second = layer[name].shape
    return (*stack, first, second) if name == KERNEL else (*stack, second, first)


def save_lora(folder: Path, config: DecoderConfig, lora: Params, alpha: float, folded: Folded | None = None) -> Path:
    """Write adapters as PEFT saves them, for `jaxinfer.LanguageModel.load_adapter` and others; return the folder.

    They add ``alpha / rank`` times their output. ``folded`` are the factors of the model that they were trained on
    (`LanguageModel.folded`): what is written is for the model before these were folded into it. Raises InvalidOption
    for a model whose checkpoints hold several kernels in one tensor: there the adapters would have to share ``down``.
    """
    names = family_of({"model_type": config.family}).tensor_names(config)
    tensors: dict[str, np.ndarray] = {}
    ranks: set[int] = set()
    for path, adapter in _adapters(lora, (BLOCKS,)):
        layers, stacked, name, _ = locate((*path, KERNEL), adapter["down"].shape)
        assert layers is not None
        source = names.block[name]
        part = source if isinstance(source, Part) else None if isinstance(source, tuple) else Part(source)
        if part is None or part.total:
            raise InvalidOption(
                f"{config.family}: its checkpoints hold {name} in a tensor with others: merge the adapters"
            )
        of = name.removesuffix(f".{KERNEL}")
        for at, layer in enumerate(layers):
            down, up = (
                np.asarray(adapter[each][at] if stacked else adapter[each], np.float32) for each in ("down", "up")
            )
            inputs, outputs = (None, None) if folded is None else (folded.inputs(layer, of), folded.outputs(layer, of))
            down = down if inputs is None else down / inputs
            up = up if outputs is None else up * outputs[:, None]
            rows = np.empty_like(up)
            rows[part.rows(len(up))] = up
            module = part.tensor.format(layer=layer).removesuffix(".weight")
            tensors |= {f"{PREFIX}{module}.lora_A.weight": down, f"{PREFIX}{module}.lora_B.weight": rows}
            ranks.add(len(down))
    (rank,) = ranks
    modules = {tensor.removeprefix(PREFIX).rpartition(".lora_")[0] for tensor in tensors}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": sorted({".".join(module.split(".")[-2:]) for module in modules}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / WEIGHTS)
    return folder


def _adapters(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Params]]:
    """Yield the path and the matrices of each adapter."""
    for name, value in node.items():
        if any(isinstance(below, Mapping) for below in value.values()):
            yield from _adapters(value, (*path, name))
        else:
            yield (*path, name), value
