"""Tiny random llama models made and run by Hugging Face transformers: the other side of the parity tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def build_model(seed: int = 0, **config: Any) -> Any:
    """Build a llama whose weights are scaled so that attention is sharp and logits have a deviation above 1."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **config})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            elif name.endswith("bias") or "embed_tokens" in name:
                weight.copy_(0.5 * noise)
            else:
                gain = 1.5 if "q_proj" in name or "k_proj" in name or "lm_head" in name else 1.0
                weight.copy_(gain * noise * weight.shape[1] ** -0.5)
    return model


def save_model(model: Any, folder: Path, version: int = 5, **options: Any) -> Path:
    """Save a model as safetensors, with ``config.json`` as transformers 4 or 5 writes it."""
    model.save_pretrained(folder, **options)
    if version == 4:
        path = folder / "config.json"
        path.write_text(json.dumps(as_version_4(json.loads(path.read_text()))))
    return folder


def as_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of transformers 5 in the keys of transformers 4."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    return config


def forget_lengths(model: Any) -> None:
    """Undo what dynamic scaling remembers of longer texts, so that each text is rotated for itself."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)


def logits_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Return ``[T, V]`` of one text."""
    import torch

    forget_lengths(model)
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].float().numpy()


def greedy_tokens(model: Any, ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Continue one text greedily with transformers' own generate, past any token that ends a text."""
    import torch

    forget_lengths(model)
    tokens = torch.tensor([list(ids)])
    lengths = {"min_new_tokens": max_new_tokens, "max_new_tokens": max_new_tokens}
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **lengths)
    return output[0, len(ids) :].tolist()
