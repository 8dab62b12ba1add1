"""Reads the rotary positions of a ``config.json`` in the forms of transformers 4 and 5."""

from jaxinfer.models.config import RopeScaling
from jaxinfer.models.families.config_reader import ConfigReader

_KINDS = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn")}


def read_rope(reader: ConfigReader, max_position: int) -> tuple[float, RopeScaling | None]:
    """Return the base of the rotary frequencies and their scaling.

    Transformers 4 writes ``rope_theta`` and ``rope_scaling``; transformers 5 writes ``rope_parameters`` with the base
    inside. Both name the kind by ``rope_type`` or, before 4.43, ``type``.
    """
    stated = reader.has("rope_theta")
    theta = reader.positive_float("rope_theta", default=10000.0)
    scaling, parameters = reader.section("rope_scaling"), reader.section("rope_parameters")
    if scaling is not None and parameters is not None:
        raise reader.refuse("rope_scaling", "...", "rope_parameters is set too; keep one of them")
    section = parameters if scaling is None else scaling
    if section is None:
        return theta, None
    inner = section.positive_float("rope_theta", default=theta)
    if stated and inner != theta:
        raise section.refuse("rope_theta", inner, f"it contradicts the outer rope_theta {theta:g}")
    return inner, section.finish(_read_scaling(section, max_position))


def _read_scaling(section: ConfigReader, max_position: int) -> RopeScaling | None:
    old_kind = section.choice("type", _KINDS, default="default")
    kind = section.choice("rope_type", _KINDS, default=old_kind)
    if section.has("type") and kind != old_kind:
        raise section.refuse("type", old_kind, f"it contradicts rope_type {kind}")
    if kind == "linear":
        return RopeScaling("linear", section.positive_float("factor", least=1.0), max_position)
    if kind == "dynamic":
        return _read_dynamic(section, max_position)
    if kind == "llama3":
        return _read_llama3(section)
    if kind == "yarn":
        return _read_yarn(section, max_position)
    return None


def _read_dynamic(section: ConfigReader, max_position: int) -> RopeScaling:
    original = section.positive_int("original_max_position_embeddings", default=max_position)
    # Transformers reads only max_position_embeddings here, so another length would silently mean something else.
    if original != max_position:
        why = f"dynamic scaling starts at max_position_embeddings ({max_position})"
        raise section.refuse("original_max_position_embeddings", original, why)
    return RopeScaling("dynamic", section.positive_float("factor", least=1.0), max_position)


def _read_llama3(section: ConfigReader) -> RopeScaling:
    low = section.positive_float("low_freq_factor")
    high = section.positive_float("high_freq_factor")
    if high <= low:
        raise section.refuse("high_freq_factor", high, f"it must exceed low_freq_factor ({low:g})")
    return RopeScaling(
        "llama3",
        section.positive_float("factor", least=1.0),
        section.positive_int("original_max_position_embeddings"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(section: ConfigReader, max_position: int) -> RopeScaling:
    original = section.positive_int("original_max_position_embeddings", default=max_position)
    # A null factor means the ratio of the lengths; transformers treats a zero in the other optional numbers as absent.
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
