"""A tiny random OPT, as a folder, whose positions end soon."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxinfer.models.families.registry import decoder_config
from tests.toys import VOCAB_SIZE, random_params
from train.model.export import named_tensors

NUM_POSITIONS = 24
CONFIG: Mapping[str, Any] = {
    "model_type": "opt",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": NUM_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


def opt_tensors() -> dict[str, np.ndarray]:
    """Draw the model's tensors, under the names that transformers writes."""
    config = decoder_config(CONFIG)
    tensors = {name: np.asarray(tensor) for name, tensor in named_tensors(config, random_params(config))}
    # As large as the words beside them, so that a wrong row of the table shows.
    words, positions = (f"model.decoder.embed_{part}.weight" for part in ("tokens", "positions"))
    return {**tensors, positions: tensors[positions] * (tensors[words].std() / tensors[positions].std())}


def write_model(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a configuration and weights, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
