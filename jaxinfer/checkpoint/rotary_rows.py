"""The row order of queries and keys: Meta and llama.cpp rotate neighbours, Hugging Face the halves of a head.

And that of fused ones: llama.cpp has all queries, all keys, then all values, some of Hugging Face's group by group.
"""

import numpy as np


def half_split_places(num_rows: int, num_heads: int) -> np.ndarray:
    """Return, for each row in interleaved order, its row in Hugging Face's order.

    Interleaved rotary positions rotate rows 2i and 2i + 1 of a head together; Hugging Face rotates rows i and i + H /
    2.
    """
    return np.arange(num_rows).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)


def grouped_places(num_rows: int, num_heads: int, num_kv_heads: int) -> np.ndarray:
    """Return, for each row of all queries, keys and values, its row where each key/value head has its group of them."""
    queries = num_heads // num_kv_heads
    groups = np.arange(num_kv_heads * (queries + 2)).reshape(num_kv_heads, -1)
    heads = np.concatenate([groups[:, :queries].reshape(-1), groups[:, queries], groups[:, queries + 1]])
    width = num_rows // len(heads)
    return (heads[:, None] * width + np.arange(width)).reshape(-1)
