"""Which mesh axis splits each logical axis of a parameter, a cache or a batch."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxinfer.notation import DATA, EXPERT, PIPELINE, SEQUENCE, TENSOR

# The axes that split rows, or None.
RowAxes = str | tuple[str, ...] | None

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
        "slots": SEQUENCE,
    }
)


def mesh_spec(axes: Iterable[str | None]) -> PartitionSpec:
    """Translate logical axes to mesh axes."""
    return PartitionSpec(*(None if axis is None else SPLIT_BY[axis] for axis in axes))


def split_rows(count: int, mesh: Mesh | AbstractMesh, over_experts: bool = True) -> RowAxes:
    """Return the axes that split ``count`` rows evenly: ``data``, and ``expert`` too if it divides them further.

    Stages cut a batch into microbatches, and prompts split over ``sequence`` go around a ring: on such meshes every
    device of ``expert`` has all rows of its group.
    """
    data, further = _devices_of_rows(mesh)
    if over_experts and further > data and count % further == 0:
        return DATA, EXPERT
    return DATA if count % data == 0 else None


def filled_rows(at_least: int, mesh: Mesh | AbstractMesh) -> int:
    """Return the fewest rows that ``data`` splits evenly, or ``expert`` too if there is more than one for each device.

    Rows that only ``data`` splits are all on every device of ``expert``: a few that fill the batch up cost less.
    """
    data, further = _devices_of_rows(mesh)
    devices = further if at_least > further else data
    return -(-at_least // devices) * devices


def _devices_of_rows(mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Return how many devices of ``data`` split rows, and how many with those of ``expert`` where these may too."""
    data, expert, stages, ring = (mesh.shape.get(axis, 1) for axis in (DATA, EXPERT, PIPELINE, SEQUENCE))
    return data, data * expert if stages == ring == 1 else data
