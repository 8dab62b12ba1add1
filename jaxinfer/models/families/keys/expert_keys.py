"""The ``config.json`` keys of experts that several families share."""

from jaxinfer.models.config import Experts, Scoring
from jaxinfer.models.families.keys.config_reader import ConfigReader

_LOCAL = "num_local_experts"


def read_experts(
    reader: ConfigReader,
    sizes: tuple[tuple[str, int], tuple[str, int], tuple[str, int]],
    layers: tuple[bool, ...] = (True,),
    *,
    scoring: Scoring = "softmax",
    normalised: bool = True,
) -> Experts | None:
    """Return the experts of the layers that have them, None if no layer has.

    ``sizes`` are the keys and the defaults of the number of experts, of a token's, and of their width. Transformers 5
    may write the first as ``num_local_experts``.
    """
    (count_key, usual), (chosen_key, _), _ = sizes
    local = reader.positive_int(_LOCAL) if reader.has(_LOCAL) else None
    count = reader.positive_int(count_key, local or usual)
    chosen, width = (reader.positive_int(key, default) for key, default in sizes[1:])
    if local not in (None, count):
        raise reader.refuse(_LOCAL, local, f"{count_key} is {count}")
    if chosen > count:
        raise reader.refuse(chosen_key, chosen, f"there are {count} experts ({count_key})")
    if not any(layers):
        return None
    return Experts(count, chosen, width, scoring=scoring, normalised=normalised, layer_pattern=layers)


def read_sparse_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every ``decoder_sparse_step``-th, but for those of ``mlp_only_layers``."""
    step = reader.positive_int("decoder_sparse_step", default=1)
    dense = reader.places("mlp_only_layers", num_layers)
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))
