"""One layer of a stack of kernels, read where it lies.

A slice of a stack would be copied before a loop that reads parts of it: of a layer with experts, all of them.
"""

from dataclasses import dataclass
from typing import Any

import jax

from jaxinfer.notation import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerView:
    """Layer ``layer`` of ``stack``: ``[L, E, out, in]``, an array or a quantized one, or an array ``[L, out, in]``."""

    stack: Any
    layer: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's kernels, or of its kernel."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> Any:
        """The dtype of plain kernels."""
        return self.stack.dtype

    def flat(self, index: Int[Array, "*B"] | int) -> tuple[Any, Array]:
        """Return the stack as ``[L * E, out, in]``, and the places of experts in it.

        If a device has one expert, the compiler knows that its index in ``[L, E, out, in]`` is 0 in every turn of a
        loop, and would copy it before.
        """
        merged = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), self.stack)
        return merged, self.layer * self.shape[0] + index

    def whole(self) -> Any:
        """Return the kernels of all experts, or the kernel."""
        return jax.tree.map(lambda part: part[self.layer], self.stack)
