"""What linear layers multiplied while texts were read, and the ways to choose codes by it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Array, Float, Params
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

# Where a linear layer is in a block; of experts, the stack of their kernels.
Place = tuple[str, ...]


class Seen(NamedTuple):
    """What the inputs of a linear layer were, in float32.

    That is the means of ``x x^T``, ``[K, K]``, and of ``|x|``, ``[K]``, and the largest ``|x|``, ``[K]``.
    """

    squares_KK: Any
    sizes_K: Any
    most_K: Any


@runtime_checkable
class Method(Protocol):
    """A way to choose the codes of one layer's weights."""

    def prepare(self, config: DecoderConfig, block: Params, seen: Callable[[Place], Seen]) -> Params:
        """Return a block with the same output that is quantized in its place; ``seen`` are its inputs as it was.

        It has the factors that were folded into it (`jaxinfer.models.folded`).
        """
        ...

    def factors(self, kernels: Sequence[Float[Array, "_ K"]], seen: Callable[[], Seen]) -> Float[Array, " K"] | None:
        """Return by what the inputs of kernels are to be divided, and their weights multiplied; None: by nothing."""
        ...

    def choose(self, place: Place, kernel: Float[Array, "N K"], seen: Seen) -> QuantizedArray:
        """Return a kernel in few bits."""
        ...

    def nearest(self, kernel: Float[Array, "N K"]) -> QuantizedArray:
        """Return a kernel of whose inputs too little is known, rounded to the nearest."""
        ...


def seen_in(parts: Iterable[Any], count: int) -> Seen:
    """Return what ``count`` rows were, which come in several parts ``[R, K]``; rows of zeros are none."""
    squares_KK, sizes_K, most_K = jnp.zeros(()), jnp.zeros(()), jnp.zeros(())
    for rows in parts:
        found = sums_of(rows)
        squares_KK, sizes_K = squares_KK + found.squares_KK, sizes_K + found.sizes_K
        most_K = jnp.maximum(most_K, found.most_K)
    return Seen(squares_KK / count, sizes_K / count, most_K)


@jax.jit
def sums_of(rows_RK: Float[Array, "R K"]) -> Seen:
    """Return sums over rows, and the largest."""
    sizes_RK = jnp.abs(rows_RK)
    squares_KK = jnp.matmul(rows_RK.T, rows_RK, precision=jax.lax.Precision.HIGHEST)
    return Seen(squares_KK, jnp.sum(sizes_RK, axis=0), jnp.max(sizes_RK, axis=0))
