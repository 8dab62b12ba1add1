"""Reads the rotary positions of a ``config.json``, in the forms of transformers 4 and 5."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import Rope, RopeScaling
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.rope_frequencies import angles_are_finite

_MOST_LANES = 1 << 14
_KINDS = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")}
_KINDS["su"] = "longrope"  # its name in the first files of Phi-3


def read_rope(
    reader: ConfigReader, max_position: int, head_dim: int, *, theta: float = 10000.0, partial: float | None = None
) -> Rope:
    """Return the rotary positions of all layers.

    Transformers 4 writes ``rope_theta`` and ``rope_scaling``; transformers 5 writes ``rope_parameters`` with the base
    inside. Both give the kind in ``rope_type`` or, before 4.43, in ``type``. ``theta`` is the family's default base.
    ``partial`` is its default for the rotated fraction of a head, None if the whole head always rotates.
    """
    stated = reader.has("rope_theta")
    outer = reader.positive_float("rope_theta", default=theta)
    scaling, parameters = reader.section("rope_scaling"), reader.section("rope_parameters")
    if scaling is not None and parameters is not None:
        raise reader.refuse("rope_scaling", "...", "rope_parameters is set too; keep one of them")
    section = parameters if scaling is None else scaling
    if partial is not None:
        partial = reader.positive_float("partial_rotary_factor", default=partial)
    reader.positive_int("original_max_position_embeddings", default=max_position)
    if section is None:
        return unscaled_rope(reader, max_position, head_dim, outer, partial)
    inner = section.positive_float("rope_theta", default=outer)
    if stated and inner != outer:
        raise section.refuse("rope_theta", inner, f"it contradicts the outer rope_theta {outer:g}")
    return read_section(reader, section, max_position, head_dim, inner, partial)


def with_rope_section(config: Mapping[str, Any], usual: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a ``config.json`` with the section that transformers takes where there is none, and the base it names."""
    if config.get("rope_scaling") or config.get("rope_parameters"):
        return config
    section = {**usual, "rope_theta": config.get("rope_theta", usual["rope_theta"])}
    return {**config, "rope_scaling": None, "rope_parameters": section}


def read_section(
    reader: ConfigReader,
    section: ConfigReader,
    max_position: int,
    head_dim: int,
    theta: float,
    partial: float | None = None,
) -> Rope:
    """Return the rotary positions of one section whose base has been read."""
    if partial is not None:
        partial = section.positive_float("partial_rotary_factor", default=partial)
    dim = _rotary_lanes(reader, head_dim, partial)
    rope = section.finish(Rope(theta, dim, _read_scaling(reader, section, max_position, dim)))
    if not angles_are_finite(rope, max_position):
        kind = rope.scaling.kind if rope.scaling is not None else "default"
        why = f"with the numbers beside it and {dim} rotating lanes the angles are not finite"
        raise section.refuse("rope_type", kind, why)
    return rope


def read_kind_rope(
    reader: ConfigReader,
    max_position: int,
    head_dim: int,
    layer_type: str = "full_attention",
    *,
    bases: Mapping[str, tuple[str, float]],
) -> Rope:
    """Return the rotary positions of one kind of layer; transformers 4 scales only those of full attention.

    ``bases`` holds for each kind the key of transformers 4 for the base, and its default.
    """
    key, default = bases[layer_type]
    stated, theta = reader.has(key), reader.positive_float(key, default=default)
    scaling, parameters = reader.section("rope_scaling"), reader.section("rope_parameters")
    if scaling is not None and parameters is not None:
        raise reader.refuse("rope_scaling", "...", "rope_parameters is set too; keep one of them")
    section = scaling if layer_type == "full_attention" else None
    if parameters is not None:
        sections = {kind: parameters.section(kind) for kind in bases}
        section = parameters.finish(sections[layer_type])
    if section is None:
        return unscaled_rope(reader, max_position, head_dim, theta)
    inner = section.positive_float("rope_theta", default=theta)
    if stated and inner != theta:
        raise section.refuse("rope_theta", inner, f"it contradicts {key} ({theta:g})")
    return read_section(reader, section, max_position, head_dim, inner)


def unscaled_rope(
    reader: ConfigReader, max_position: int, head_dim: int, theta: float, partial: float | None = None
) -> Rope:
    """Return unscaled rotary positions whose base has been read."""
    rope = Rope(theta, _rotary_lanes(reader, head_dim, partial))
    if not angles_are_finite(rope, max_position):
        raise reader.refuse("rope_theta", theta, "with it rotary angles are not finite")
    return rope


def _rotary_lanes(reader: ConfigReader, head_dim: int, partial: float | None) -> int:
    """Return how many lanes of a head rotate; the number is even."""
    dim = head_dim if partial is None else int(head_dim * partial)
    if dim % 2 or not 0 < dim <= head_dim:
        name = "head_dim" if partial is None else "partial_rotary_factor"
        raise reader.refuse(name, partial or head_dim, f"rotary positions need an even number of lanes, not {dim}")
    if dim > _MOST_LANES:  # a table of angles is made of them
        raise reader.refuse("head_dim", head_dim, f"no head has more than {_MOST_LANES} rotary lanes")
    return dim


def _read_scaling(reader: ConfigReader, section: ConfigReader, max_position: int, dim: int) -> RopeScaling | None:
    old_kind = section.choice("type", _KINDS, default="default")
    kind = section.choice("rope_type", _KINDS, default=old_kind)
    if section.has("type") and kind != old_kind:
        raise section.refuse("type", old_kind, f"it contradicts rope_type {kind}")
    if kind == "linear":
        return RopeScaling("linear", section.positive_float("factor", least=1.0), max_position)
    if kind == "dynamic":
        return _read_dynamic(section, max_position)
    if kind == "llama3":
        return _read_llama3(section, _read_original(reader, section, None))
    if kind == "yarn":
        return _read_yarn(section, max_position, _read_original(reader, section, max_position))
    if kind == "longrope":
        return _read_longrope(section, max_position, _read_original(reader, section, max_position), dim)
    return None


def _read_original(reader: ConfigReader, section: ConfigReader, default: int | None) -> int:
    """Return the length before scaling; a value beside the section takes precedence over one inside it."""
    name = "original_max_position_embeddings"
    outer = reader.positive_int(name) if reader.has(name) else None
    inner = section.positive_int(name, default=outer or default)
    return outer or inner


def _read_dynamic(section: ConfigReader, max_position: int) -> RopeScaling:
    original = section.positive_int("original_max_position_embeddings", default=max_position)
    # Transformers reads only max_position_embeddings here, so any other length would have another meaning.
    if original != max_position:
        why = f"dynamic scaling starts at max_position_embeddings ({max_position})"
        raise section.refuse("original_max_position_embeddings", original, why)
    return RopeScaling("dynamic", section.positive_float("factor", least=1.0), max_position)


def _read_llama3(section: ConfigReader, original: int) -> RopeScaling:
    low = section.positive_float("low_freq_factor")
    high = section.positive_float("high_freq_factor")
    if high < low:
        raise section.refuse("high_freq_factor", high, f"it must be at least low_freq_factor ({low:g})")
    return RopeScaling(
        "llama3",
        section.positive_float("factor", least=1.0),
        original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(section: ConfigReader, max_position: int, original: int) -> RopeScaling:
    # A null factor means the ratio of the lengths. For the other optional numbers, transformers treats zero as absent.
    ratio = max_position / original if section.is_null("factor") else None
    factor = section.positive_float("factor", default=ratio, least=1.0)
    beta_fast = section.optional_float("beta_fast") or 32.0
    beta_slow = section.optional_float("beta_slow") or 1.0
    if beta_fast < beta_slow:
        raise section.refuse("beta_fast", beta_fast, f"it must be at least beta_slow ({beta_slow:g})")
    attention_factor = section.optional_float("attention_factor")
    if attention_factor == 0:
        raise section.refuse("attention_factor", 0, "it must be above 0")
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
        mscale=section.optional_float("mscale") or None,
        mscale_all_dim=section.optional_float("mscale_all_dim") or None,
        truncate=section.boolean("truncate", default=True),
    )


def _read_longrope(section: ConfigReader, max_position: int, original: int, dim: int) -> RopeScaling:
    return RopeScaling(
        "longrope",
        section.positive_float("factor", default=max_position / original),
        original,
        attention_factor=section.optional_float("attention_factor") or None,
        short_factors=section.positive_floats("short_factor", dim // 2),
        long_factors=section.positive_floats("long_factor", dim // 2),
    )
