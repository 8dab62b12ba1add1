"""Reads from a ``config.json`` which layers have a sliding window."""

from jaxinfer.models.families.keys.config_reader import ConfigReader

_LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}


def read_window(reader: ConfigReader, default: int | None) -> int | None:
    """Return how many tokens a windowed layer attends to, itself included; None if the key is null.

    ``default`` None means no window where the key is absent.
    """
    if not reader.has("sliding_window") and (default is None or reader.is_null("sliding_window")):
        return None
    return reader.positive_int("sliding_window", default=default)


def read_layer_types(reader: ConfigReader, num_layers: int) -> tuple[bool, ...] | None:
    """Return for each layer whether it has a sliding window; None if ``layer_types`` is absent or null."""
    if not reader.has("layer_types"):
        return None
    return reader.choices("layer_types", _LAYER_TYPES, num_layers)
