"""The columns of down projections, kept beside their rows where features are left out.

A step that reads the weights of a few features alone wants those of one feature next to each other, ``[in, out]``. A
prompt, and a step in which most features are active, read all, and read ``[out, in]`` faster. So both are kept.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.layers import BLOCKS, KERNEL
from jaxinfer.notation import Params

# The name of a kernel's columns among a linear layer's parameters.
COLUMNS = "columns"


def feed_forward_kernels(params: Params) -> dict[str, Mapping[str, Any]]:
    """Return the linear layers of each block's dense feed-forward layer, by the block's name; a stack is one block."""
    return {".".join(path): mlp for path, mlp in _feed_forward(params[BLOCKS], ())}


def _feed_forward(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if "mlp" in node:
        if "down" in node["mlp"]:
            yield path or (BLOCKS,), node["mlp"]
        return
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _feed_forward(value, (*path, name))


class ActiveColumns:
    """Adds the columns of a model's down projections to parameters that have these."""

    def __init__(self, params: Params) -> None:
        self._columns = {name: jnp.array(mlp["down"][KERNEL].T) for name, mlp in feed_forward_kernels(params).items()}
        self._last: tuple[Params, Params] | None = None

    def beside(self, params: Params) -> Params:
        """Return parameters with the columns; for the same object the same one."""
        if self._last is None or self._last[0] is not params:
            blocks = dict(params[BLOCKS])
            for name, columns in self._columns.items():
                mlp = blocks[name]["mlp"]
                down = {**mlp["down"], COLUMNS: columns}
                blocks[name] = {**blocks[name], "mlp": {**mlp, "down": down}}
            self._last = params, {**params, BLOCKS: blocks}
        return self._last[1]
