"""Latent attention (MLA; DeepSeek-V2, 2405.04434) as data: what a decoder's config says of it.

A token's keys and values of all heads are products of one compressed vector, its *latent*. A cache holds that vector
and one rotated key, which all heads share: a row ``[rotated key, latent]``, and no values, for they are the same row's.
"""

from dataclasses import dataclass

# The epsilon of the norms of queries' and keys' compressed vectors, whatever that of the other norms is.
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Latent:
    """The widths of latent attention.

    ``rank`` is the latent's. A head compares ``content_dim`` lanes that do not rotate beside those that the layer's
    rotary positions turn, and has values of ``value_dim``. ``query_rank`` is the width that queries are compressed to
    and normed in; None without.
    """

    rank: int
    content_dim: int
    value_dim: int
    query_rank: int | None = None
