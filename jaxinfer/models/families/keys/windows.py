"""Reads from a ``config.json`` which layers have a window, and which rotate."""

from jaxinfer.models.families.keys.config_reader import ConfigReader

_LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}
_CHUNKED_TYPES = {"full_attention": False, "chunked_attention": True}


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


def read_chunks(reader: ConfigReader, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the tokens of each layer's chunks, None if it sees all.

    Without ``layer_types``, the layers that rotate attend in chunks, and none do if ``attention_chunk_size`` is null.
    """
    size, in_chunks = reader.optional_int("attention_chunk_size", default=8192), rotates
    if reader.has("layer_types"):
        in_chunks = reader.choices("layer_types", _CHUNKED_TYPES, len(rotates))
        if any(in_chunks) and size is None:
            raise reader.refuse("attention_chunk_size", None, "layer_types has layers that attend in chunks")
    return tuple(size if chunked else None for chunked in in_chunks)


def read_rotating_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions: a list says it, or else all but the last of every few do."""
    interval = reader.positive_int("no_rope_layer_interval", default=4)
    if reader.has("no_rope_layers"):
        return reader.flags("no_rope_layers", num_layers)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
