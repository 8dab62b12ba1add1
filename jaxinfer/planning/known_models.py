"""The models that can be planned: well-known ones by name, others by their ``config.json``."""

import json
from importlib import resources
from os.path import expanduser
from pathlib import Path

from jaxinfer.checkpoint.first_layers import check_layers
from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.checkpoint.published.open import read_scheme
from jaxinfer.errors import CheckpointNotFound
from jaxinfer.models.config import DecoderConfig, shallower
from jaxinfer.models.families.registry import decoder_config

_FILE = "known_models.json"
_CONFIG = "config.json"


def known_models() -> dict[str, str]:
    """Return the names of the built-in models, with their ids on the Hugging Face hub."""
    return {name: entry["hub"] for name, entry in _entries().items()}


def planned_config(model: str, layers: int | None = None) -> DecoderConfig:
    """Return the config of a built-in model, a Hugging Face folder or a ``config.json``; weights are not read.

    ``layers`` are how many of its first layers to plan (None: all); raise InvalidOption if it has fewer.

    How a checkpoint's weights were quantized must be known, and is left out: the decoder is the same. Raise
    CheckpointNotFound if it is none of these.
    """
    config = _whole_config(model)
    if layers is None:
        return config
    check_layers(config, layers)
    return shallower(config, layers)


def _whole_config(model: str) -> DecoderConfig:
    entry = _entries().get(model.lower().removesuffix("-instruct"))
    if entry is not None:
        return decoder_config(entry["config"])
    path = Path(expanduser(model))
    if path.is_dir():
        path = path / _CONFIG
    if not path.is_file():
        known = ", ".join(_entries())
        raise CheckpointNotFound(f"{model!r}: no folder with a {_CONFIG}, no such file, and no built-in model: {known}")
    return decoder_config(read_scheme(read_json_object(path))[0])


def _entries() -> dict[str, dict]:
    return json.loads(resources.files("jaxinfer.planning").joinpath(_FILE).read_text(encoding="utf-8"))
