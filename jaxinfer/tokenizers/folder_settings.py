"""Reads the settings beside a vocabulary in a Hugging Face folder."""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.chat_template import ChatTemplate

_ID = re.compile(r"[0-9]{1,10}")
_MOST_TEMPLATE_BYTES = 1 << 20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class FolderSettings:
    """The tokenizer settings in a folder's JSON files.

    ``special_tokens`` maps ``bos_token`` and the like to their text. ``added_tokens`` maps ids to tokens that are
    parsed whole. ``add_bos``, ``add_eos`` and ``add_prefix_space`` are None if the folder leaves them to the vocabulary
    file. ``bos_id`` and ``eos_ids`` come from the model's config. ``tokenizer_class`` is the name in transformers.
    """

    origin: Path
    special_tokens: Mapping[str, str]
    added_tokens: Mapping[int, AddedToken]
    add_bos: bool | None
    add_eos: bool | None
    add_prefix_space: bool | None
    legacy: bool
    chat_templates: Mapping[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    names_bos: bool
    extra_special_tokens: tuple[str, ...] = ()
    tokenizer_class: str | None = None

    def find_id(self, role: str, token_to_id: Callable[[str], int | None]) -> int | None:
        """Return the id of a named special token, None if there is no name; raise if the name is not a token."""
        content = self.special_tokens.get(role)
        if content is None:
            return None
        found = token_to_id(content)
        if found is None:
            raise InvalidTokenizer(
                f"{self.origin}: {role} is {content!r}, which is not in the vocabulary: correct tokenizer_config.json"
            )
        return found

    def choose_bos(self, named: int | None) -> int | None:
        """Return the tokenizer files' value, even an explicit null, before that of the model's config."""
        return named if self.names_bos else self.bos_id

    def choose_eos(self, named: int | None) -> tuple[int, ...]:
        """Return the ids that end generation and the id that ends a text."""
        return tuple(dict.fromkeys([*self.eos_ids, *([] if named is None else [named])]))

    def make_chat_template(self) -> ChatTemplate | None:
        """Return the folder's chat templates, None if it has none."""
        return ChatTemplate(self.chat_templates, self.special_tokens) if self.chat_templates else None


def read_folder_settings(folder: Path, model_config: Mapping[str, Any]) -> FolderSettings:
    """Read all settings files of the folder; a missing file counts as empty."""
    config = read_json_object(folder / "tokenizer_config.json")
    named = {**read_json_object(folder / "special_tokens_map.json"), **config}
    generation = read_json_object(folder / "generation_config.json")
    special = {role: _read_content(named[role], folder, role) for role in _NAMED_TOKENS if named.get(role) is not None}
    return FolderSettings(
        origin=folder,
        special_tokens=special,
        added_tokens=_read_added_tokens(config, folder),
        add_bos=_read_flag(config, "add_bos_token", folder),
        add_eos=_read_flag(config, "add_eos_token", folder),
        add_prefix_space=_read_flag(config, "add_prefix_space", folder),
        legacy=bool(_read_flag(config, "legacy", folder)),
        chat_templates=_read_chat_templates(config, folder),
        bos_id=next(iter(_read_ids(generation, model_config, "bos_token_id", folder)), None),
        eos_ids=_read_ids(generation, model_config, "eos_token_id", folder),
        names_bos="bos_token" in named,
        extra_special_tokens=_read_extra_tokens(named, folder),
        tokenizer_class=_read_class(config, model_config, folder),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a file that holds one JSON object; a missing file counts as empty."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidTokenizer(f"{path} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise InvalidTokenizer(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _read_content(value: Any, folder: Path, role: str) -> str:
    """Return the text of a token that is given as a string or as an object with a ``content``."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise InvalidTokenizer(f"{folder}: {role} must be a string or an object with a 'content', not {value!r}")
    return content


def _read_added_tokens(config: Mapping[str, Any], folder: Path) -> dict[int, AddedToken]:
    declared = config.get("added_tokens_decoder") or {}
    tokens: dict[int, AddedToken] = {}
    for key, value in declared.items() if isinstance(declared, dict) else [("", declared)]:
        if not _ID.fullmatch(key) or not isinstance(value, dict):
            raise InvalidTokenizer(f"{folder}: added_tokens_decoder must map ids to tokens, not {key!r} to {value!r}")
        flags = {name: bool(value.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        normalized = bool(value.get("normalized", not flags["special"]))
        tokens[int(key)] = AddedToken(
            _read_content(value, folder, f"added token {key}"), normalized=normalized, **flags
        )
    return tokens


def _read_extra_tokens(named: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    name = "extra_special_tokens" if named.get("extra_special_tokens") else "additional_special_tokens"
    tokens = named.get(name) or []
    if not isinstance(tokens, list | dict):
        raise InvalidTokenizer(f"{folder}: {name} must be a list of tokens, not {tokens!r:.80}")
    values = tokens.values() if isinstance(tokens, dict) else tokens
    return tuple(_read_content(value, folder, f"a token in {name}") for value in values)


def _read_class(config: Mapping[str, Any], model_config: Mapping[str, Any], folder: Path) -> str | None:
    name = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if name is not None and not isinstance(name, str):
        raise InvalidTokenizer(f"{folder}: tokenizer_class must be a string, not {name!r:.80}")
    return name


def _read_flag(config: Mapping[str, Any], name: str, folder: Path) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidTokenizer(f"{folder}: {name} in tokenizer_config.json must be true or false, not {value!r}")
    return value


def _read_ids(generation: Mapping[str, Any], model: Mapping[str, Any], name: str, folder: Path) -> tuple[int, ...]:
    """Return one or several ids; the generation config comes before the model's config."""
    value = generation.get(name) if generation.get(name) is not None else model.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    # Some configs write -1 if there is no such token.
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= -1 for one in ids):
        raise InvalidTokenizer(f"{folder}: {name} must be a token id or a list of them, not {value!r}")
    return tuple(one for one in ids if one >= 0)


def _read_chat_templates(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Collect the templates by name; files take precedence over ``tokenizer_config.json``."""
    given = config.get("chat_template") or {}
    if isinstance(given, str):
        given = {"default": given}
    elif isinstance(given, list) and all(isinstance(one, dict) and "name" in one for one in given):
        given = {one["name"]: one.get("template") for one in given}
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise InvalidTokenizer(f"{folder}: chat_template must be a string or a list of named templates")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    # Links that lead nowhere count: a template that someone meant must not be left out silently.
    if os.path.lexists(folder / "chat_template.jinja"):
        files["default"] = folder / "chat_template.jinja"
    return {**given, **{name: read_template(path) for name, path in files.items()}}


def read_template(path: Path) -> str:
    """Return the text of a file that has a chat template."""
    if not path.is_file():
        raise InvalidTokenizer(f"{path}: a chat template must be a regular file; fetch it again")
    if path.stat().st_size > _MOST_TEMPLATE_BYTES:
        raise InvalidTokenizer(f"{path}: a chat template of {path.stat().st_size} bytes is no template; fetch it again")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidTokenizer(f"{path}: a chat template is not UTF-8: {error}") from error
