"""The row order of queries and keys: Meta and llama.cpp rotate neighbours, Hugging Face the halves of a head."""

import numpy as np


def half_split_places(num_rows: int, num_heads: int) -> np.ndarray:
    """Return, for each row in interleaved order, its row in Hugging Face's order.

    Interleaved rotary positions rotate rows 2i and 2i + 1 of a head together; Hugging Face rotates rows i and i + H /
    2.
    """
    return np.arange(num_rows).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)
