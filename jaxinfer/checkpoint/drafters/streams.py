"""Parameters of speculative streams on disk: ``streams.json``, a `StreamsDescription`, and ``streams.safetensors``.

Tensors are named by their path in `jaxinfer.models.drafters.streams`: ``init.down``, ``identifiers`` and so on. An
optional ``tree.json`` holds a draft tree for the streams: paths, the highest gain first.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.described import Files, check_count, read_settings, read_tensors
from jaxinfer.checkpoint.drafters.shipped import check_fingerprint
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.streams import StreamsConfig
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend

_FILES = Files("streams", "streams.json", "streams.safetensors")
# File formats may differ in these, or lack them, for the same network.
_NOT_THE_NETWORK = ("family", "max_position", "bos_token_id", "eos_token_ids")


@dataclass(frozen=True)
class StreamsDescription:
    """Describes streams and the model that they were trained on; ``base`` names it for the reader.

    ``base_layers`` is the model's number of layers, ``base_digest`` its `network_digest`. ``base_fingerprint``
    identifies its weights (`jaxinfer.models.fingerprint`). Each is None if unknown. ``adapter_rank`` is 0 without
    adapters.
    """

    num_streams: int
    num_layers: int
    rank: int
    exit_rank: int
    model_dim: int
    vocab_size: int
    base_layers: int
    base_digest: str
    base: str | None = None
    adapter_rank: int = 0
    base_fingerprint: str | None = None


def read_streams(
    folder: Path,
    config: DecoderConfig,
    backend: Backend,
    fingerprint: Callable[[], str | None] = lambda: None,
) -> tuple[StreamsConfig, Params]:
    """Read the streams of a model of this config.

    Raises :class:`CheckpointNotFound` or :class:`InvalidCheckpoint` for files that are missing or damaged, and for
    streams that were trained on another network or on other weights than those of ``fingerprint``.
    """
    _FILES.check(folder)
    description = _read_description(folder / _FILES.description)
    _check_base(folder, description, config)
    check_fingerprint(folder, description.base_fingerprint, fingerprint)
    streams = StreamsConfig(*(getattr(description, field.name) for field in fields(StreamsConfig)))
    # Streams share the cache with the sequence, and a mask does not hide what is not a number.
    return streams, read_tensors(folder, _FILES, streams.shapes(config), backend.param_dtype, "the streams")


def write_streams(
    folder: Path,
    streams: StreamsConfig,
    stream_params: Params,
    config: DecoderConfig,
    *,
    base: str | None = None,
    base_fingerprint: str | None = None,
    beside: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
) -> StreamsDescription:
    """Write the streams of a model of this config to a new folder.

    ``beside`` are further files, their texts by name. ``overwrite`` replaces a folder of streams.
    """
    description = StreamsDescription(
        **asdict(streams),
        model_dim=config.model_dim,
        vocab_size=config.vocab_size,
        base_layers=config.num_layers,
        base_digest=network_digest(config),
        base=base,
        base_fingerprint=base_fingerprint,
    )
    tensors = {path: _at(stream_params, path) for path in streams.shapes(config)}
    _FILES.write(folder, description, tensors, beside=beside, overwrite=overwrite)
    return description


def network_digest(config: DecoderConfig) -> str:
    """Return a digest of a network. It is the same for all file formats and differs for any other shape or variant."""
    described = {key: value for key, value in _described(config).items() if key not in _NOT_THE_NETWORK}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _described(value: Any) -> Any:
    """Return a config without its default values, so that new fields do not change old digests."""
    if is_dataclass(value):
        settings = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        return {
            name: _described(value)
            for name, (value, default) in settings.items()
            if default is MISSING or value != default
        }
    if isinstance(value, tuple):
        return [_described(one) for one in value]
    # GGUF files hold float32 numbers, configs hold decimals.
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _read_description(path: Path) -> StreamsDescription:
    settings = read_settings(path, StreamsDescription)
    for field in fields(StreamsDescription):
        is_optional = field.default is not MISSING
        if field.type is int:
            value = settings.get(field.name, field.default if is_optional else None)
            check_count(path, field.name, value, 0 if is_optional else 1)
    if not isinstance(settings.get("base_digest"), str):
        raise InvalidCheckpoint(f"{path}: base_digest must be text, not {settings.get('base_digest')!r}")
    return StreamsDescription(**settings)


def _check_base(folder: Path, description: StreamsDescription, config: DecoderConfig) -> None:
    of = f" of {description.base}" if description.base else ""
    sizes = {
        "hidden channels": (description.model_dim, config.model_dim),
        "tokens": (description.vocab_size, config.vocab_size),
        "layers": (description.base_layers, config.num_layers),
    }
    for name, (theirs, has) in sizes.items():
        if theirs != has:
            raise InvalidCheckpoint(
                f"{folder}: the streams{of} were trained on a model of {theirs} {name}, but this one has {has}"
            )
    if description.num_layers >= config.num_layers:
        raise InvalidCheckpoint(
            f"{folder}: num_layers={description.num_layers} is not inside the model's {config.num_layers} layers"
        )
    if description.base_digest != network_digest(config):
        raise InvalidCheckpoint(
            f"{folder}: the streams{of} were trained on the network {description.base_digest}, but this model is "
            f"{network_digest(config)}: load the model that they were trained on"
        )


def _at(stream_params: Mapping[str, Any], path: str) -> Any:
    node: Any = stream_params
    for part in path.split("."):
        node = node[part]
    return node
