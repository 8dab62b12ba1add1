"""Which mesh axis splits each logical axis of a parameter, a cache or a batch."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from jax.sharding import PartitionSpec

from jaxinfer.notation import DATA, EXPERT, PIPELINE, SEQUENCE, TENSOR

# Megatron's split (Shoeybi et al., 1909.08053): by heads and by hidden features, with one sum after each half of a
# block.
SPLIT_BY: Mapping[str, str | None] = MappingProxyType(
    {
        "heads": TENSOR,
        "kv_heads": TENSOR,
        "query_heads": TENSOR,
        "latent_heads": TENSOR,
        "content_heads": TENSOR,
        "rotary_heads": TENSOR,
        "value_heads": TENSOR,
        "ffn": TENSOR,
        "shared_ffn": TENSOR,
        "expert_ffn": TENSOR,
        "expert": EXPERT,
        "vocab": TENSOR,
        "embed": None,
        "head_dim": None,
        "layers": PIPELINE,
        "batch": DATA,
        "slots": SEQUENCE,
    }
)


def mesh_spec(axes: Iterable[str | None]) -> PartitionSpec:
    """Translate logical axes to mesh axes."""
    return PartitionSpec(*(None if axis is None else SPLIT_BY[axis] for axis in axes))
