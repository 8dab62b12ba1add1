"""The tokens and settings in a GGUF file's metadata that all kinds of vocabulary share."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.chat_template import ChatTemplate

_NAMED_TOKENS = MappingProxyType({"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"})
_END_ROLES = ("eos", "eot", "eom")


@dataclass(frozen=True)
class GGUFTokens:
    """A vocabulary's tokens and their kinds by id, and the ids of special tokens by role (``bos``, ``eot``, ...)."""

    origin: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]
    ids: Mapping[str, int]

    @property
    def named_ids(self) -> dict[str, int]:
        """The ids of ``bos_token`` and the like."""
        return {f"{name}_token": self.ids[role] for role, name in _NAMED_TOKENS.items() if role in self.ids}

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of ``bos_token`` and the like."""
        return {name: self.tokens[token] for name, token in self.named_ids.items()}

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text, a turn or a message."""
        return tuple(dict.fromkeys(self.ids[role] for role in _END_ROLES if role in self.ids))

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, None if it has none."""
        template = self.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise InvalidTokenizer(
                f"{self.origin}: tokenizer.chat_template must be a string, not {type(template).__name__}"
            )
        return ChatTemplate(template, self.special_tokens) if template else None

    def flag(self, name: str, default: bool) -> bool:
        """Read a boolean key."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise InvalidTokenizer(f"{self.origin}: tokenizer.ggml.{name} must be true or false, not {value!r:.80}")
        return value

    def strings(self, name: str) -> list[str]:
        """Read a key that holds a list of strings."""
        return _read_strings(self.metadata, name, self.origin)


def read_tokens(metadata: Mapping[str, Any], origin: str, default_ids: Mapping[str, int]) -> GGUFTokens:
    """Read what all kinds of vocabulary share; ``default_ids`` are for roles that the file does not mention."""
    tokens = _read_strings(metadata, "tokens", origin)
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or not all(type(kind) is int for kind in kinds):
        raise InvalidTokenizer(
            f"{origin}: tokenizer.ggml.token_type must have one entry a token, a whole number: fetch the file again"
        )
    ids = {role: one for role, one in default_ids.items() if one < len(tokens)}
    for role in (*_NAMED_TOKENS, *_END_ROLES):
        value = _read_id(metadata, role, len(tokens), origin)
        if value is not None:
            ids[role] = value
    return GGUFTokens(origin, metadata, tokens, kinds, ids)


def _read_strings(metadata: Mapping[str, Any], name: str, origin: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise InvalidTokenizer(f"{origin}: tokenizer.ggml.{name} must be a list of strings: fetch the file again")
    return value


def _read_id(metadata: Mapping[str, Any], role: str, num_tokens: int, origin: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is not None and not (type(value) is int and 0 <= value < num_tokens):
        raise InvalidTokenizer(
            f"{origin}: {key} is {value!r:.80}, outside the {num_tokens} tokens: fetch the file again"
        )
    return value
