"""Tiny random models as published: a folder whose matrices a case packs, and the same model of plain numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.published.packing import Case
from tests.models.hugging_face import build_model
from tests.models.variants.variant import Variant

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def write_published(folder: Path, case: Case, model: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a model whose linear layers but the head a case packs; return the weights of these, and give them to it."""
    import torch

    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    weights: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            module = name.removesuffix(".weight")
            if not module.endswith("_proj"):
                tensors[name] = tensor
                continue
            packed, found = case.pack(rng, *tensor.shape)
            tensors |= {f"{module}.{part}": values for part, values in packed.items()}
            weights[name] = found
            tensor.copy_(torch.from_numpy(found))
    write_folder(folder, tensors, {**model.config.to_dict(), "quantization_config": dict(case.config)})
    return weights


def write_folder(folder: Path, tensors: Any, config: Any) -> None:
    """Write a folder of tensors, of the file's metadata where they are texts, and a ``config.json``."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    texts = {name: value for name, value in tensors.items() if isinstance(value, str)}
    numbers = {
        name: (as_torch(value) if isinstance(value, np.ndarray) else value).contiguous()
        for name, value in tensors.items()
        if name not in texts
    }
    save_file(numbers, folder / "model.safetensors", metadata=texts or None)
    (folder / "config.json").write_text(json.dumps(config))


def as_torch(values: np.ndarray) -> Any:
    """Return an array of any dtype as a tensor."""
    import torch

    kinds = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn)}
    values = np.array(values)
    if values.dtype.name in kinds:
        stored, kind = kinds[values.dtype.name]
        return torch.from_numpy(values.view(stored)).view(kind)
    return torch.from_numpy(values)


def plain_model() -> Any:
    """Return a random Llama of transformers."""
    return build_model(Variant({}, sizes=SIZES))
