"""One layer of a stack of kernels, read where it lies.

A slice of a stack would be copied before a loop that reads parts of it: of a layer with experts, all of them.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jaxinfer.notation import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerView:
    """Layer ``layer`` of ``stack [L, E, out, in]``."""

    stack: Any
    layer: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's kernels."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> Any:
        """The dtype of the kernels."""
        return self.stack.dtype

    def expert(self, index: Int[Array, ""]) -> Array:
        """Return one expert's kernel."""
        flat, place = self.flat(index)
        return lax.dynamic_index_in_dim(flat, place, keepdims=False)

    def flat(self, index: Int[Array, ""]) -> tuple[Array, Array]:
        """Return the stack as ``[L * E, out, in]``, and an expert's place in it.

        If a device has one expert, the compiler knows that its index in ``[L, E, out, in]`` is 0 in every turn of a
        loop, and would copy it before.
        """
        return self.stack.reshape(-1, *self.shape[1:]), self.layer * self.shape[0] + index

    def whole(self) -> Array:
        """Return the kernels of all experts."""
        return self.stack[self.layer]
