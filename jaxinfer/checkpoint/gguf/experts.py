"""What llama.cpp's architectures with experts share: names of tensors of all experts, and numbers of experts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.metadata import MetadataReader

# A layer's tensors but for its router.
STACKS: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
)


def shared_parts(name: str) -> dict[str, str]:
    """Return the tensors of an expert that all tokens have, in the layer of this name."""
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


def read_expert_counts(reader: MetadataReader, count_key: str = "num_experts", gating: int = 1) -> dict[str, Any]:
    """Read how many experts there are and how many of them a token has.

    ``gating`` is llama.cpp's number of how the architecture weighs them: 1 is a softmax.
    """
    if reader.optional_int("expert_gating_func") not in (None, gating):
        kind = "a softmax" if gating == 1 else "a softmax of the chosen"
        raise reader.refuse("expert_gating_func", f"only {kind} ({gating}) is implemented for this architecture")
    return {
        count_key: reader.positive_int("expert_count"),
        "num_experts_per_tok": reader.positive_int("expert_used_count"),
    }
