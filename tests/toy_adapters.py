"""Random adapters for tiny models, as PEFT saves them; strong enough to change what is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint.adapters.other_tensors import PREFIX
from jaxinfer.checkpoint.adapters.peft_folder import WEIGHTS
from jaxinfer.checkpoint.adapters.settings import CONFIG
from jaxinfer.models.adapters import common_shapes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import names_of
from jaxinfer.models.families.registry import family_of
from jaxinfer.notation import Params
from train.model.lora import save_lora

Tensors = dict[str, np.ndarray]


def random_lora(config: DecoderConfig, seed: int, rank: int, only: tuple[str, ...] | None = None) -> Params:
    """Draw adapters for all linear layers, or those of some names, stacked over the layers."""
    rng, blocks = np.random.default_rng(seed), {}
    for name, (outputs, inputs) in common_shapes(config).items():
        if only is not None and name not in only:
            continue
        part, _, linear = name.partition(".")
        down, up = (rng.standard_normal((config.num_layers, *shape)) for shape in ((rank, inputs), (outputs, rank)))
        pair = {"down": down * inputs**-0.5, "up": 0.5 * up * rank**-0.5}
        blocks.setdefault(part, {})[linear] = {each: values.astype(np.float32) for each, values in pair.items()}
    return blocks


def write_adapter(
    folder: Path, config: DecoderConfig, seed: int = 0, rank: int = 4, only: tuple[str, ...] | None = None
) -> Path:
    """Write a random adapter whose outputs are scaled by 2."""
    return save_lora(folder, config, random_lora(config, seed, rank, only), alpha=2.0 * rank)


def edit_adapter(folder: Path, edit: Callable[[dict[str, Any], Tensors], None]) -> Path:
    """Change an adapter's settings and tensors in place."""
    settings, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    edit(settings, tensors)
    (folder / CONFIG).write_text(json.dumps(settings))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / WEIGHTS)
    return folder


def with_tables(folder: Path, config: DecoderConfig, seed: int = 7) -> Path:
    """Let an adapter change an embedding, an output matrix and norms, too, and the biases of OPT."""
    names, rng = family_of({"model_type": config.family}).tensor_names(config), np.random.default_rng(seed)
    vocab, width, rank = config.vocab_size, config.model_dim, json.loads((folder / CONFIG).read_text())["r"]

    def drawn(*shape: int) -> np.ndarray:
        return (0.5 * rng.standard_normal(shape)).astype(np.float32)

    def edit(settings: dict[str, Any], tensors: Tensors) -> None:
        (embedding,) = names_of(names.top["embed.embedding"])
        head, norm = (names.top.get(name, "lm_head.weight") for name in ("head.kernel", "final_norm.scale"))
        modules = [PREFIX + str(tensor).removesuffix(".weight") for tensor in (embedding, head)]
        settings["target_modules"] = [*settings["target_modules"], *(each.rpartition(".")[2] for each in modules)]
        settings |= {"modules_to_save": [str(norm).removesuffix(".weight")], "bias": "all"}
        for name, values in {
            f"{modules[0]}.lora_embedding_A": drawn(rank, vocab),
            f"{modules[0]}.lora_embedding_B": drawn(width, rank),
            f"{modules[1]}.lora_A.weight": drawn(rank, width),
            f"{modules[1]}.lora_B.weight": drawn(vocab, rank),
            PREFIX + str(norm): 1 + drawn(width),
        }.items():
            tensors[name] = values
        if config.family == "opt":
            for layer in range(config.num_layers):
                tensors[f"{PREFIX}model.decoder.layers.{layer}.fc1.bias"] = drawn(config.ffn_dim)
                tensors[f"{PREFIX}model.decoder.layers.{layer}.self_attn_layer_norm.bias"] = drawn(width)

    return edit_adapter(folder, edit)


def with_magnitudes(settings: dict[str, Any], tensors: Tensors) -> None:
    """Make an adapter a DoRA; see `edit_adapter`."""
    settings["use_dora"] = True
    rng = np.random.default_rng(9)
    for name in [name for name in tensors if name.endswith("lora_B.weight")]:
        norms = 1 + rng.random(len(tensors[name]), dtype=np.float32)
        tensors[name.replace("lora_B", "lora_magnitude_vector")] = norms
