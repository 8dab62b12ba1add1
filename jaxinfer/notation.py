"""The letters that end array names.

======  ==========================================
letter  meaning
======  ==========================================
B       batch rows
T       new (query) tokens of a row
S       cache slots of a row
L       layers
D       model width
F       feed-forward width
V       vocabulary
N       query heads
K       key/value heads
G       query heads of one key/value head, N / K
H       head width
P       pages
Z       tokens of a page
M       nodes of a draft tree
W       window
======  ==========================================

Arrays end in their letters (``query_BTNH``, ``logits_BTV``). Two letters may stand for one flattened axis, in that
order (``KH`` in ``keys_LBSKH`` is one axis of ``K * H`` lanes). Python integers use words (``num_layers``).

Devices form a mesh with the axes ``data`` (rows), ``pipeline`` (layers), ``sequence`` (tokens and slots) and ``tensor``
(heads, features and the vocabulary).
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int, Int8, UInt32

# A nested dictionary of arrays, as Flax Linen stores parameters.
Params = dict[str, Any]

# Ordered from the axis that communicates least to the one that communicates most, which gets the nearest devices.
MESH_AXES = ("data", "pipeline", "sequence", "tensor")
DATA, PIPELINE, SEQUENCE, TENSOR = MESH_AXES

__all__ = [
    "DATA",
    "MESH_AXES",
    "PIPELINE",
    "SEQUENCE",
    "TENSOR",
    "Array",
    "Bool",
    "Float",
    "Int",
    "Int8",
    "Params",
    "UInt32",
]
