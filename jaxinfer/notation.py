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
======  ==========================================

Where a text is drafted or searched (`jaxinfer.decoding`, `jaxinfer.models.drafters`) there are also:

======  ==========================================================================================
letter  meaning
======  ==========================================================================================
J       steps along a path, a depth of the tree each: what drafts there, a head or a stream
R       ranks: the likeliest tokens at one place
C       nodes or texts picked out of more, or these more: candidates
I       nodes that have children
W       texts or columns side by side: a search's beams, lookahead's window, a grown tree's level
Q       rows of the cache of a beam search, B * W
U       tokens that a head knows
A       kinds of drafts, counted apart
E       entries of a list: stop tokens, the tokens of an n-gram
======  ==========================================================================================

In layers with experts (`jaxinfer.models.experts`, `jaxinfer.ops.experts`) E counts experts, C those that a token goes
to, and R the rows of a block that one expert multiplies.

"Streams" are the rows beside a token that draft (`jaxinfer.models.drafters.streams`); a *streaming* cache forgets what
is far back (`jaxinfer.cache.streaming`); `LanguageModel.stream` yields a text as it grows.

Arrays end in their letters (``query_BTNH``, ``logits_BTV``); a product of two axes is written with both letters and
means one flattened axis in that order (``KH`` in ``keys_LBSKH`` is one axis of ``K * H`` lanes). Python integers use
words (``num_layers``).

Devices form a mesh with the axes ``data`` (rows), ``pipeline`` (layers), ``sequence`` (tokens and slots), ``expert``
(experts, and rows) and ``tensor`` (heads, features and the vocabulary).
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int, Int8, Integer, Num, UInt32

# A nested dictionary of arrays, as Flax Linen stores parameters.
Params = dict[str, Any]

# Ordered from the axis that communicates least to the one that communicates most, which gets the nearest devices.
MESH_AXES = ("data", "pipeline", "sequence", "expert", "tensor")
DATA, PIPELINE, SEQUENCE, EXPERT, TENSOR = MESH_AXES

__all__ = [
    "DATA",
    "EXPERT",
    "MESH_AXES",
    "PIPELINE",
    "SEQUENCE",
    "TENSOR",
    "Array",
    "Bool",
    "Float",
    "Int",
    "Int8",
    "Integer",
    "Num",
    "Params",
    "UInt32",
]
