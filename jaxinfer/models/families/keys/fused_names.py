"""Names queries, keys and values that are rows of one tensor, group by group."""

from collections.abc import Mapping

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part


def rows_by_group(config: DecoderConfig, tensor: str) -> Mapping[str, Part]:
    """Return where queries, keys and values stand in a tensor that has, for each key/value head, G queries and both."""
    width, groups = config.head_dim, config.num_kv_heads
    queries = config.query_heads_per_kv_head * width
    distance = queries + 2 * width
    places = {"query": (0, queries), "key": (queries, width), "value": (queries + width, width)}
    return {
        name: Part(tensor, first, groups * distance, heads=(rows, distance)) for name, (first, rows) in places.items()
    }
