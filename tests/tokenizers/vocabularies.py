"""Small tokenizers that the tests train for themselves, as checkpoints and as objects."""

import io
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxinfer.checkpoint.source import Checkpoint

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and 12345 other dogs look on.",
    "def add(a, b):\n    return a + b  # 2024\n\n\tprint(add(1, 22))",
    "hello world hello there, the world is wide: 世界 こんにちは é à ü 😀 👩‍👩‍👧",
    "user\nassistant\nsystem\nYou are a helpful assistant. What is the capital of France? Paris.",
] * 5


class NoTensors:
    """A source of tensors that has none: these tests load no weights."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        raise KeyError(name)


def open_folder(folder: Path, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Make a checkpoint of a folder that holds only a tokenizer's files."""
    return Checkpoint(origin=str(folder), config=config or {}, tensors=NoTensors(), folder=folder)


def open_gguf(metadata: Mapping[str, Any]) -> Checkpoint:
    """Make a checkpoint of a GGUF file's metadata."""
    return Checkpoint(origin="toy.gguf", config={}, tensors=NoTensors(), gguf_metadata=metadata)


def train_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer | None = None) -> tokenizers.Tokenizer:
    """Train a byte-level BPE that isolates digits, as SmolLM2's does."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizer or pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    pipeline.train_from_iterator(CORPUS, trainer)
    return pipeline


def make_byte_fallback() -> tokenizers.Tokenizer:
    """Make a BPE that writes unknown characters byte by byte and marks words by a leading space, as Llama's does."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    names += ["▁", "a", "b", "c", "x", "▁a", "▁b", "ab", "▁ab", "é"]
    pipeline = tokenizers.Tokenizer(
        models.BPE(
            {name: index for index, name in enumerate(names)},
            [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    pipeline.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names[:3]])
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pipeline.decoder = decoders.Sequence(steps)
    return pipeline


def train_sentence_piece(**options: Any) -> bytes:
    """Train a SentencePiece model in Llama's manner: BPE, byte fallback, no normalization."""
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "vocab_size": 400,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "control_symbols": ["[INST]", "[/INST]"],
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **(settings | options))
    return model.getvalue()


def to_gguf_metadata(pipeline: tokenizers.Tokenizer, pre: str = "smollm", **more: Any) -> dict[str, Any]:
    """Write a byte-level BPE as the key-value section of a GGUF file."""
    content = json.loads(pipeline.to_str())
    names = sorted(pipeline.get_vocab(), key=pipeline.get_vocab().__getitem__)
    kinds = {token["content"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    merges = content["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [kinds.get(name, 1) for name in names],
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in merges],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def to_gguf_sentence_piece(model: bytes, user_defined: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """Write a SentencePiece model as the key-value section of a GGUF file, as llama.cpp's converter does."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    ids = range(processor.vocab_size())
    names = [processor.id_to_piece(token) for token in ids]
    scores = [processor.get_score(token) for token in ids]
    tests = (processor.is_unknown, 2), (processor.is_control, 3), (processor.is_unused, 5), (processor.is_byte, 6)
    kinds = [next((kind for test, kind in tests if test(token)), 1) for token in ids]
    for name in user_defined:  # with their spaces, below all others
        token = names.index(name)
        names[token], scores[token], kinds[token] = name.replace("▁", " "), -1000.0, 4
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def draw_ids(seed: int, vocab_size: int, length: int) -> list[int]:
    """Draw ids uniformly: mostly nonsense, broken characters included."""
    return random.Random(seed).choices(range(vocab_size), k=length)
