"""What an ``adapter_config.json`` of PEFT says: which modules have an adapter, of which rank, and how strong it is."""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel, shown

CONFIG = "adapter_config.json"
# What else changes the results, and what it has to be.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
_BIASES = ("none", "all", "lora_only")
# Others begin at weights that are not the base model's.
_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
_WHOLE_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_LONGEST_PATTERN = 1000


@dataclass(frozen=True)
class AdapterSettings:
    """The part of a PEFT configuration that inference needs; `read_settings` makes one.

    ``targets`` tells of a module's name whether it has an adapter, ``ranks`` and ``alphas`` have patterns of names and
    the numbers that stand instead of ``rank`` and ``alpha`` there. With ``has_biases`` biases of the model are stored
    too, with ``has_shifts`` (``lora_bias``) each low rank has one of its own. With ``is_tied``
    (``ensure_weight_tying``) an output matrix that is the embedding has the embedding's changes, and none of its own.
    ``saved`` are modules whose tensors are stored whole, ``token_rows`` the rows of embeddings that are, by a module's
    name; an empty name is the embedding's. ``parameters`` are the ends of the names of parameters that are adapted
    instead of modules.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    is_dora: bool
    targets: Callable[[str], bool]
    is_all_linear: bool = False
    has_biases: bool = False
    has_shifts: bool = False
    is_tied: bool = False
    saved: tuple[str, ...] = ()
    token_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()

    def has_parameter(self, name: str) -> bool:
        """Tell whether a parameter has an adapter of its own."""
        return any(name == each or name.endswith(f".{each}") for each in self.parameters)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return what the product of a module's two matrices is multiplied by (rsLoRA: Kalajdzievski, 2312.03732)."""
        alpha, rank = _by_pattern(self.alphas, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank

    def rows_of(self, module: str) -> tuple[int, ...]:
        """Return the tokens whose rows of an embedding are stored, none if it is not named."""
        named = (rows for name, rows in self.token_rows.items() if name and f".{module}".endswith(f".{name}"))
        return next(named, self.token_rows.get("", ()))


def read_settings(folder: Path) -> AdapterSettings:
    """Read ``adapter_config.json``.

    Raises :class:`UnsupportedModel` for what inference would have to follow and does not, and
    :class:`InvalidCheckpoint` for what contradicts itself.
    """
    path = folder / CONFIG
    found = read_json_object(path)
    kind = found.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{path}: peft_type {shown(kind)} is not supported: only LORA")
    for key, allowed in _ONLY.items():
        value = found.get(key)
        if value not in allowed:
            raise UnsupportedModel(
                f"{path}: {key} = {shown(value)} is not supported: train without, or merge with PEFT"
            )
    bias = found.get("bias")
    if not (bias is None or bias in _BIASES):
        raise InvalidCheckpoint(f"{path}: bias = {shown(bias)} is none of {', '.join(_BIASES)}")
    init = found.get("init_lora_weights")
    if not any(init is one or init == one for one in _INITS):
        raise UnsupportedModel(
            f"{path}: init_lora_weights = {shown(init)} changes the base model: save the adapter converted, with "
            "path_initial_model_for_weight_conversion"
        )
    return AdapterSettings(
        rank=_number(path, "r", found.get("r", 8), int),
        alpha=_number(path, "lora_alpha", found.get("lora_alpha", 8), float),
        ranks=_pattern_numbers(path, "rank_pattern", found, int),
        alphas=_pattern_numbers(path, "alpha_pattern", found, float),
        is_rank_stabilized=_flag(path, "use_rslora", found),
        is_dora=_flag(path, "use_dora", found),
        targets=_read_targets(path, found),
        parameters=_listed(path, "target_parameters", found),
        is_all_linear=found.get("target_modules") == "all-linear",
        has_biases=bias in _BIASES[1:],
        has_shifts=_flag(path, "lora_bias", found),
        is_tied=_flag(path, "ensure_weight_tying", found),
        saved=_listed(path, "modules_to_save", found),
        token_rows=_read_token_rows(path, found.get("trainable_token_indices")),
    )


def _listed(path: Path, key: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    value = found.get(key)
    if not isinstance(value, list | None) or not all(isinstance(name, str) and name for name in value or ()):
        raise InvalidCheckpoint(f"{path}: {key} = {shown(value)} is no list of names")
    return tuple(value or ())


def _read_token_rows(path: Path, value: Any) -> Mapping[str, tuple[int, ...]]:
    named = value if isinstance(value, Mapping) else {"": value or []}
    rows = {}
    for module, tokens in named.items():
        is_list = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
        if not is_list or len(set(tokens)) != len(tokens):
            raise InvalidCheckpoint(f"{path}: trainable_token_indices = {shown(value)} is no list of tokens")
        if tokens:
            rows[module] = tuple(tokens)
    return rows


def _read_targets(path: Path, found: Mapping[str, Any]) -> Callable[[str], bool]:
    wanted, left_out = (_names(path, key, found.get(key)) for key in ("target_modules", "exclude_modules"))
    layers = found.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) and not isinstance(layers, bool) else layers
    if layers is not None and not (isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)):
        raise InvalidCheckpoint(f"{path}: layers_to_transform = {shown(layers)} is no list of layers")
    patterns = _names(path, "layers_pattern", found.get("layers_pattern"))
    patterns = [patterns] if isinstance(patterns, str) and patterns else patterns
    compiled = [_compiled(path, rf"(?:^|.*?\.){each}\.(\d+)\.") for each in patterns or ()] or [_WHOLE_LAYER]
    if not wanted and not found.get("target_parameters"):
        raise UnsupportedModel(f"{path}: target_modules = {shown(wanted)} names no module")
    every = wanted == "all-linear"
    whole = _compiled(path, wanted) if isinstance(wanted, str) and not every else None
    whole_out = _compiled(path, left_out) if isinstance(left_out, str) and left_out else None

    def is_listed(names: Any, module: str) -> bool:
        return any(module == name or module.endswith(f".{name}") for name in names or ())

    def targets(module: str) -> bool:
        is_out = whole_out.fullmatch(module) if whole_out else is_listed(left_out, module)
        if is_out or every:
            return not is_out
        if whole is not None:
            return whole.fullmatch(module) is not None
        if module in (wanted or ()) or not layers:
            return is_listed(wanted, module)
        match = next((match for each in compiled if (match := each.match(module))), None)
        return is_listed(wanted, module) and match is not None and int(match[1]) in layers

    return targets


def _names(path: Path, key: str, value: Any) -> str | Sequence[str] | None:
    """Return a pattern or a list of names."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidCheckpoint(f"{path}: {key} = {shown(value)} is neither a pattern nor a list of names")
    return value


def _pattern_numbers(path: Path, key: str, found: Mapping[str, Any], kind: type) -> Mapping[str, Any]:
    value = found.get(key) or {}
    if not isinstance(value, Mapping):
        raise InvalidCheckpoint(f"{path}: {key} = {shown(value)} is no object")
    for pattern in value:
        _compiled(path, rf"(.*\.)?({pattern})$")
    return {pattern: _number(path, key, number, kind) for pattern, number in value.items()}


def _by_pattern(numbers: Mapping[str, Any], module: str, default: Any) -> Any:
    found = (number for pattern, number in numbers.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _compiled(path: Path, pattern: str) -> re.Pattern[str]:
    try:
        if len(pattern) <= _LONGEST_PATTERN:
            return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        pass
    raise InvalidCheckpoint(f"{path}: {shown(pattern)} is no pattern of names")


def _number(path: Path, key: str, value: Any, kind: type) -> Any:
    # Whole numbers of JSON have any size.
    is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not is_number or (kind is int and (value != int(value) or value < 1)):
        what = "a whole number of 1 or more" if kind is int else "a number"
        raise InvalidCheckpoint(f"{path}: {key} = {shown(value)} is not {what}")
    return kind(value)


def _flag(path: Path, key: str, found: Mapping[str, Any]) -> bool:
    value = found.get(key) or False
    if not isinstance(value, bool):
        raise InvalidCheckpoint(f"{path}: {key} = {shown(value)} is neither true nor false")
    return value
