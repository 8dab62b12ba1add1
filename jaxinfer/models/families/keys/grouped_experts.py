"""The ``config.json`` keys of DeepSeek's experts: dense layers first, then shared and chosen experts, in groups."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxinfer.models.config import Experts
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts

_METHODS: Mapping[str, Mapping[str, bool]] = {
    "softmax": {"greedy": False, "group_limited_greedy": True},
    "sigmoid": {"noaux_tc": True},
}
_LAYERS = {"dense": False, "sparse": True}


@dataclass(frozen=True)
class Usual:
    """A family's values for absent keys: the number of experts, of a token's, and their width, and of the rest."""

    sizes: tuple[int, int, int]
    dense: int = 0
    groups: int = 1
    kept_groups: int = 1
    shared: int = 1
    scale: float = 1.0
    normalised: bool = True


def read_grouped_experts(reader: ConfigReader, num_layers: int, usual: Usual, scoring: str) -> Experts | None:
    """Return the experts of the layers that have them, None if no layer has.

    ``sigmoid`` scores are those of DeepSeek-V3, whose groups are compared by their two best and whose choice is
    corrected; ``softmax`` ones are DeepSeek-V2's. Layers that predict further tokens are left out.
    """
    layers = _read_layers(reader, num_layers, usual.dense)
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    count, chosen, width = zip(keys, usual.sizes)
    normalised = reader.boolean("norm_topk_prob", default=usual.normalised)
    if normalised and scoring == "softmax":
        raise reader.refuse("norm_topk_prob", True, "of softmax scores, transformers does not divide by the sum")
    reader.choice("scoring_func", {scoring: None}, default=scoring)
    methods = _METHODS[scoring]
    is_grouped = reader.choice("topk_method", methods, default=next(iter(methods)))
    groups, kept = (
        reader.optional_int(key, default=default) or 1
        for key, default in (("n_group", usual.groups), ("topk_group", usual.kept_groups))
    )
    scale = reader.positive_float("routed_scaling_factor", default=usual.scale)
    shared = reader.optional_int("n_shared_experts", default=usual.shared) or 0
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        reader.natural_int(key, default=0)
    if reader.positive_int("moe_layer_freq", default=1) != 1:
        raise reader.refuse("moe_layer_freq", 2, "after the first dense layers all have experts")
    is_sigmoid = scoring == "sigmoid"
    experts = read_experts(reader, (count, chosen, width), layers, normalised=normalised)
    if experts is None:
        return None
    groups, kept = (groups, kept) if is_grouped else (1, 1)
    size = experts.num_experts // groups
    if experts.num_experts % groups or (groups > 1 and size < 2):
        raise reader.refuse("n_group", groups, f"{experts.num_experts} experts are no groups of two or more")
    if not kept <= groups or experts.per_token > kept * size:
        raise reader.refuse("topk_group", kept, f"of {groups} groups it leaves too few for a token's experts")
    return replace(
        experts,
        shared_dim=shared * experts.ffn_dim,
        scoring="sigmoid" if is_sigmoid else "softmax",
        scale=scale,
        correction_bias=is_sigmoid,
        groups=groups,
        kept_groups=kept,
        group_score="two_best" if is_sigmoid else "best",
    )


def _read_layers(reader: ConfigReader, num_layers: int, usual: int) -> tuple[bool, ...]:
    """Return which layers have experts: those that a list of words says, or those after the first dense ones."""
    dense = reader.natural_int("first_k_dense_replace", default=usual)
    if reader.has("mlp_layer_types"):
        return reader.choices("mlp_layer_types", _LAYERS, num_layers)
    return tuple(layer >= dense for layer in range(num_layers))
