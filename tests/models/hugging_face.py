"""Tiny random models made and run by Hugging Face transformers: the other side of the parity tests."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.variants.variant import Variant


def build_model(variant: Variant, seed: int = 0) -> Any:
    """Build a tiny model whose weights are scaled so that attention is sharp and logits have a deviation above 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.pytorch_utils import Conv1D

    config = AutoConfig.for_model(variant.model_type, **{**variant.sizes, **variant.config})
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    model = (AutoModelForCausalLM if is_text else AutoModelForImageTextToText).from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    input_axis = {name: 0 if isinstance(module, Conv1D) else 1 for name, module in model.named_modules()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module, _, kind = name.rpartition(".")
            noise = torch.randn(weight.shape, generator=generator)
            if kind.endswith("bias") or re.search(r"embed|wte|wpe", module):
                weight.copy_(0.5 * noise)
            elif kind == "sinks":
                weight.copy_(2 * noise)
            elif weight.ndim == 1:  # a norm's: around its neutral value, 1 or (added to 1) 0
                weight.copy_(weight.mean().round() + 0.3 * noise)
            else:
                gain = 1.5 if re.search(r"[qk]_proj|c_attn|qkv_proj|lm_head", module) else 1.0
                # Kernels of experts are stacked.
                weight.copy_(gain * noise * weight.shape[input_axis[module] + weight.ndim - 2] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def save_model(model: Any, folder: Path, variant: Variant, version: int = 5, **options: Any) -> Path:
    """Save a model as safetensors, with ``config.json`` as transformers 4 or 5 writes it."""
    model.save_pretrained(folder, **options)
    if version == 4:
        path = folder / "config.json"
        path.write_text(json.dumps(variant.to_version_4(json.loads(path.read_text()))))
    return folder


def forget_lengths(model: Any) -> None:
    """Undo what dynamic scaling remembers of longer texts, so that each text is rotated for itself."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is not None:
        model.base_model.rotary_emb = type(rotary)(model.config)


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
