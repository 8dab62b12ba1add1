"""The byte-level BPE inside a GGUF file's metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.chat_template import ChatTemplate
from jaxinfer.tokenizers.hugging_face import HuggingFaceTokenizer, add_begin_and_end

_CONTROL, _USER_DEFINED = 3, 4
_NAMED_TOKENS = MappingProxyType({"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"})
_END_ROLES = ("eos", "eot", "eom")


@dataclass(frozen=True)
class WordSplit:
    """How a vocabulary's text is cut into words before merging; ``pattern`` None means GPT-2's own."""

    pattern: str | None = None
    isolates_digits: bool = False
    composes: bool = False  # Unicode NFC first
    ignores_merges: bool = False  # a word that is a token stays whole
    adds_bos: bool = False  # where the file does not say


_LLAMA_3 = WordSplit(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignores_merges=True,
    adds_bos=True,
)
_QWEN_2 = WordSplit(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    composes=True,
)
WORD_SPLITS: Mapping[str, WordSplit] = MappingProxyType(
    {
        "gpt-2": WordSplit(),
        "smollm": WordSplit(isolates_digits=True),
        "llama-bpe": _LLAMA_3,
        "qwen2": _QWEN_2,
    }
)


def read_gguf_vocabulary(metadata: Mapping[str, Any], origin: str) -> HuggingFaceTokenizer:
    """Build the tokenizer that a GGUF file's key-value section describes."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise InvalidTokenizer(
            f"{origin}: tokenizer.ggml.model {model!r} is not supported, only 'gpt2' (byte-level BPE): "
            "give the model as a Hugging Face folder"
        )
    name = metadata.get("tokenizer.ggml.pre")
    split = WORD_SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise InvalidTokenizer(
            f"{origin}: tokenizer.ggml.pre {name!r} is not supported, only {', '.join(sorted(WORD_SPLITS))}: "
            "give the model as a Hugging Face folder"
        )
    tokens = _read_strings(metadata, "tokens", origin)
    pipeline = _build_pipeline(tokens, _read_merges(metadata, origin), split, origin)
    pipeline.add_tokens(_list_added_tokens(metadata, tokens, origin))

    ids = {
        role: found
        for role in (*_NAMED_TOKENS, *_END_ROLES)
        if (found := _read_id(metadata, role, len(tokens), origin)) is not None
    }
    special = {f"{name}_token": tokens[ids[role]] for role, name in _NAMED_TOKENS.items() if role in ids}
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", split.adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    add_begin_and_end(
        pipeline,
        bos=special.get("bos_token") if adds_bos else None,
        eos=special.get("eos_token") if adds_eos else None,
    )
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise InvalidTokenizer(f"{origin}: tokenizer.chat_template must be a string, not {type(template).__name__}")
    return HuggingFaceTokenizer(
        pipeline,
        bos_token_id=ids.get("bos"),
        eos_token_ids=tuple(dict.fromkeys(ids[role] for role in _END_ROLES if role in ids)),
        chat_template=ChatTemplate(template, special) if template else None,
    )


def _build_pipeline(
    tokens: list[str], merges: list[tuple[str, str]], split: WordSplit, origin: str
) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise InvalidTokenizer(f"{origin}: tokenizer.ggml.tokens names a token twice: fetch the file again")
    try:
        pipeline = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.ignores_merges))
    except Exception as error:  # the library raises bare exceptions
        raise InvalidTokenizer(f"{origin}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.isolates_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.composes:
        pipeline.normalizer = normalizers.NFC()
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def _list_added_tokens(metadata: Mapping[str, Any], tokens: list[str], origin: str) -> list[AddedToken]:
    """Return the tokens that are parsed whole: control tokens and user-defined ones."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise InvalidTokenizer(f"{origin}: tokenizer.ggml.token_type must have one entry a token: fetch the file again")
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _read_strings(metadata: Mapping[str, Any], name: str, origin: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise InvalidTokenizer(f"{origin}: tokenizer.ggml.{name} must be a list of strings: fetch the file again")
    return value


def _read_merges(metadata: Mapping[str, Any], origin: str) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _read_strings(metadata, "merges", origin):
        first, _, second = line.partition(" ")
        if not first or not second:
            raise InvalidTokenizer(f"{origin}: tokenizer.ggml.merges holds {line!r}, not two tokens: fetch it again")
        merges.append((first, second))
    return merges


def _read_id(metadata: Mapping[str, Any], role: str, num_tokens: int, origin: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < num_tokens):
        raise InvalidTokenizer(f"{origin}: {key} is {value!r}, outside the {num_tokens} tokens: fetch the file again")
    return value
