"""Tiny models that the tests make for themselves: random or trained, on disk as a user's would be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.decoder import Decoder, abstract_params
from jaxinfer.models.layers import KERNEL, TRANSPOSED_KERNEL
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend, choose_backend
from train.loop.step import Schedule, train
from train.model.export import save_hf_folder
from train.texts.batches import window_batches

END, BEGIN = 0, 1
NUM_SPECIAL = 2
VOCAB_SIZE = NUM_SPECIAL + 256

TINY_LLAMA = DecoderConfig(
    family="llama",
    vocab_size=VOCAB_SIZE,
    num_layers=2,
    model_dim=32,
    ffn_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=1024,
    norm_eps=1e-5,
    layer_pattern=(LayerKind(Rope(10000.0, 8)),),
    bos_token_id=BEGIN,
    eos_token_ids=(END,),
)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def float32_backend(scan_layers: bool = False) -> Backend:
    """Return how toys run: on the CPU, in float32."""
    return choose_backend("float32", "cpu", scan_layers)


def random_params(config: DecoderConfig, seed: int = 0, scan_layers: bool = False) -> Params:
    """Draw weights for which attention is sharp, biases and norms matter, and logits have a deviation above 1."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [key.key for key in path]
        center, deviation = 0.0, 0.02
        if names[-1] == "scale":
            center, deviation = config.neutral_scale, 0.3
        elif names[-1] == "bias" or names[-2] == "expert_biases":
            deviation = 0.5
        elif names[-1] == "sink_logits":
            deviation = 2.0
        elif names[-2] == "experts" or names[-1] == "weights":
            deviation = leaf.shape[-1] ** -0.5
        elif names[-1] == "correction":
            deviation = 0.2
        elif names[0] in ("embed", "head"):
            deviation = 1.5 * config.model_dim**-0.5
        elif names[-1] in (KERNEL, TRANSPOSED_KERNEL):
            width = leaf.shape[-1 if names[-1] == KERNEL else -2]
            deviation = width**-0.5 * (1.5 if names[-2] in ("query", "key") else 1.0)
        return jnp.asarray(center + deviation * rng.standard_normal(leaf.shape), leaf.dtype)

    # Not by `init_params`: it would run the network by single operations, each compiled anew in every process.
    return jax.tree_util.tree_map_with_path(draw, abstract_params(config, float32_backend(scan_layers)))


def write_byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of single bytes: ``<|end|>`` is id 0, ``<|begin|>`` id 1, byte b is id b + 2."""
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = Tokenizer(models.BPE(vocab=dict(zip(_byte_characters(), range(NUM_SPECIAL, VOCAB_SIZE))), merges=[]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    text = json.loads(pipeline.to_str())
    special = [AddedToken("<|end|>", special=True), AddedToken("<|begin|>", special=True)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    text["added_tokens"] = [{"id": index, "content": token.content, **flags} for index, token in enumerate(special)]
    text["model"]["vocab"] |= {token.content: index for index, token in enumerate(special)}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_tiny_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random llama with the byte tokenizer as a Hugging Face folder; ``changes`` are `DecoderConfig` fields."""
    config = replace(TINY_LLAMA, **changes)
    save_hf_folder(folder, config, random_params(config, seed))
    return write_byte_tokenizer(folder)


def write_trained_llama(folder: Path) -> Path:
    """Train a tiny llama on `fable_tokens` for a few seconds and write it like `write_tiny_llama`."""
    params, losses = train(
        Decoder(TRAINED_LLAMA, float32_backend()),
        Schedule(num_steps=200, peak_rate=1e-2),
        window_batches(fable_tokens(600), num_rows=12, length=96, num_steps=200, seed=0),
    )
    assert losses[-1] < 0.4, f"the toy has not learned its text: its loss is {losses[-1]:.2f}"
    save_hf_folder(folder, TRAINED_LLAMA, params)
    return write_byte_tokenizer(folder)


TRAINED_LLAMA = replace(
    TINY_LLAMA, model_dim=48, ffn_dim=96, head_dim=12, layer_pattern=(LayerKind(Rope(10000.0, 12)),)
)


def fable(num_sentences: int, seed: int = 0) -> str:
    """Tell a text that is easily learned: sentences of a small grammar, one a line."""
    rng = np.random.default_rng(seed)
    words = (
        ("The quick", "The old", "One grey", "A small"),
        ("fox", "heron", "badger", "otter"),
        ("followed", "watched", "found", "forgot"),
        ("the river", "the moon", "a red leaf", "its shadow"),
        ("at dawn", "all night", "in spring", "again"),
    )
    return "".join(" ".join(str(rng.choice(choice)) for choice in words) + ".\n" for _ in range(num_sentences))


def fable_tokens(num_sentences: int, seed: int = 0) -> list[int]:
    """Return the ids of a fable cut into texts of two sentences, each between its begin and end tokens."""
    lines = fable(num_sentences, seed).splitlines(keepends=True)
    texts = ["".join(lines[start : start + 2]) for start in range(0, num_sentences, 2)]
    return [token for text in texts for token in (BEGIN, *encode_bytes(text), END)]


def encode_bytes(text: str) -> list[int]:
    """Return the ids of the byte tokenizer."""
    return [byte + NUM_SPECIAL for byte in text.encode()]


def _byte_characters() -> list[str]:
    """Return the character by which byte-level tokenizers write each byte: itself if it is visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(256)]


def rope_of(config: DecoderConfig) -> Rope:
    """Return the rotary positions of a model whose layers all rotate alike."""
    (rope,) = {kind.rope for kind in config.kinds}
    assert rope is not None
    return rope


def with_rope(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    """Change fields of the rotary positions of a model whose layers all rotate alike."""
    rope = replace(rope_of(config), **changes)
    return replace(config, layer_pattern=tuple(replace(kind, rope=rope) for kind in config.layer_pattern))
