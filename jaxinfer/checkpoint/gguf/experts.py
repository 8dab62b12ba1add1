"""What llama.cpp's architectures with experts share: names of tensors of all experts, and numbers of experts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.metadata import MetadataReader

# llama.cpp's numbers for how experts are weighed.
SOFTMAX, SIGMOID, CHOSEN_SOFTMAX = 1, 2, 3
_WORDS: Mapping[int, str] = MappingProxyType(
    {SOFTMAX: "a softmax", SIGMOID: "a sigmoid of each", CHOSEN_SOFTMAX: "a softmax of the chosen"}
)
# A layer's tensors but for its router.
STACKS: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
)

# Those of a layer that predicts a further token, beside a block's.
FURTHER: Mapping[str, str] = MappingProxyType(
    {
        "nextn.eh_proj": "eh_proj",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.shared_head_head": "shared_head.head",
        "nextn.shared_head_norm": "shared_head.norm",
    }
)


def without_further_layers(reader: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a model without the layers that predict further tokens, which files count with the others."""
    further, both = reader.optional_int("nextn_predict_layers") or 0, sizes["num_hidden_layers"]
    if further >= both:
        raise reader.refuse("nextn_predict_layers", f"of {both} layers none would be left")
    return {**sizes, "num_hidden_layers": both - further, "num_nextn_predict_layers": further}


def shared_parts(name: str) -> dict[str, str]:
    """Return the tensors of an expert that all tokens have, in the layer of this name."""
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


def read_expert_counts(reader: MetadataReader, count_key: str = "num_experts", gating: int = SOFTMAX) -> dict[str, Any]:
    """Read how many experts there are and how many of them a token has.

    ``gating`` is llama.cpp's number of how the architecture weighs them.
    """
    if reader.optional_int("expert_gating_func") not in (None, gating):
        why = f"only {_WORDS[gating]} ({gating}) is implemented for this architecture"
        raise reader.refuse("expert_gating_func", why)
    return {
        count_key: reader.positive_int("expert_count"),
        "num_experts_per_tok": reader.positive_int("expert_used_count"),
    }
