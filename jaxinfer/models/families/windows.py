"""Reads which layers of a ``config.json`` see a sliding window only."""

from jaxinfer.models.families.config_reader import ConfigReader

_LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}


def read_window(reader: ConfigReader, default: int) -> int | None:
    """Return how many tokens a windowed layer sees, itself included; None where the key is null."""
    if reader.is_null("sliding_window"):
        return None
    return reader.positive_int("sliding_window", default=default)


def read_layer_types(reader: ConfigReader, num_layers: int) -> tuple[bool, ...] | None:
    """Tell of each layer whether it slides; None where ``layer_types`` is absent or null."""
    if not reader.has("layer_types"):
        return None
    return reader.choices("layer_types", _LAYER_TYPES, num_layers)
