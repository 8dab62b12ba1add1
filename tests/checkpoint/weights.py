"""Small checkpoints, their tensor names and their abstract parameters, made by the tests."""

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.models.families.family import TensorNames

NAMES = TensorNames(
    top={"embed.embedding": "model.embed.weight"},
    block={"mlp.up.kernel": "model.layers.{layer}.up.weight", "norm.scale": "model.layers.{layer}.norm.weight"},
    ignored=(r"model\.layers\.\d+\.inv_freq",),
)


def tensors(num_layers: int = 3, dtype=np.float32, width: int = 4) -> dict[str, np.ndarray]:
    """Make random tensors under the names of NAMES."""
    rng = np.random.default_rng(0)
    made = {"model.embed.weight": rng.standard_normal((5, width)).astype(dtype)}
    for layer in range(num_layers):
        made[f"model.layers.{layer}.up.weight"] = rng.standard_normal((6, width)).astype(dtype)
        made[f"model.layers.{layer}.norm.weight"] = rng.standard_normal(width).astype(dtype)
    return made


def abstract(dtype, num_layers: int = 3, width: int = 4, stacked: bool = True) -> dict:
    """Describe the parameters that those tensors fill."""

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def block(*lead: int) -> dict:
        return {"mlp": {"up": {"kernel": struct(*lead, 6, width)}}, "norm": {"scale": struct(*lead, width)}}

    blocks = block(num_layers) if stacked else {f"layer_{layer}": block() for layer in range(num_layers)}
    return {"embed": {"embedding": struct(5, width)}, "blocks": blocks}


def write_folder(folder: Path, made: dict[str, np.ndarray], num_shards: int = 0, config: dict | None = None) -> Path:
    """Write a Hugging Face folder, in one file or in ``num_shards`` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if not num_shards:
        save_file(made, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: made[key] for key in sorted(made)[shard::num_shards]}
        weight_map |= dict.fromkeys(part, name)
        save_file(part, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
