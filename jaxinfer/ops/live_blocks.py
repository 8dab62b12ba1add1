"""A feed-forward layer's products by a TPU's kernel that reads live blocks of weights alone (`sparse_ffn`).

A block is 128 neighbouring hidden units; it is live if one of them is not zero in some row. The other blocks' terms are
zeros, so a result has the same bits whichever of them are read. On a mesh each device lists the blocks of its own
hidden units, for its own rows.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.notation import TENSOR, Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import Split, even_axis, kernel_axes, row_axes
from jaxinfer.ops.layer_view import LayerView
from jaxinfer.ops.quantized_sums import added_over


def multiplies_live(batch: int, tokens: int, model_dim: int, units: int, backend: Backend) -> bool:
    """Whether both products go by live blocks: for tokens of a batch, and a layer's hidden units, of all devices."""
    if not backend.reads_live_blocks:
        return False
    rows, sizes = batch * tokens, {} if backend.mesh is None else backend.mesh.shape
    for axes in row_axes((batch, tokens), backend):
        rows //= math.prod(sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
    if even_axis(TENSOR, units, backend) is not None:
        units //= sizes[TENSOR]
    # Imported here: a program that is kept already starts without the kernels.
    from pallas_kernels.sparse_ffn import fits

    return fits(rows, model_dim, units, backend.compute_dtype)


def live_outputs(
    inputs: Float[Array, "*rows D"],
    kernels: Sequence[Any],
    backend: Backend,
    transposed: bool,
    split: Split,
    *,
    active: Float[Array, "*rows F"],
) -> list[Float[Array, "*rows F"]]:
    """Return a product with one kernel ``[F, D]`` for the live blocks of ``active``, and zeros elsewhere."""
    out_axis, _ = kernel_axes(kernels, split, backend)

    def multiply(inputs: Any, active: Any, kernel: Any) -> Any:
        live = _kernels().list_blocks(_flat(active))
        found = _run("live_outputs", backend)(_flat(inputs, backend), _array(kernel), live, layer=_layer(kernel))
        return found.reshape(active.shape)

    rows = row_axes(inputs.shape[:-1], backend)
    of_units = PartitionSpec(*rows, out_axis)
    parts = PartitionSpec(*rows, None), of_units, _spec(kernels[0], out_axis, None)
    return [backend.on_devices(multiply, parts, of_units)(inputs, active, kernels[0])]


def live_inputs(
    hidden: Float[Array, "*rows F"], kernels: Sequence[Any], backend: Backend, transposed: bool, split: Split
) -> list[Float[Array, "*rows D"]]:
    """Return a product with one kernel ``[D, F]`` over the live blocks of its inputs."""
    _, in_axis = kernel_axes(kernels, split, backend)

    def multiply(hidden: Any, kernel: Any) -> Any:
        rows = _flat(hidden, backend)
        live = _kernels().list_blocks(rows)
        found = _run("live_inputs", backend)(rows, _array(kernel), live, layer=_layer(kernel))
        found = found.reshape(*hidden.shape[:-1], -1)
        return found if in_axis is None else added_over(found, in_axis, backend)

    rows = row_axes(hidden.shape[:-1], backend)
    parts = PartitionSpec(*rows, in_axis), _spec(kernels[0], None, in_axis)
    return [backend.on_devices(multiply, parts, PartitionSpec(*rows, None))(hidden, kernels[0])]


def _kernels() -> Any:
    from pallas_kernels import sparse_ffn

    return sparse_ffn


def _run(name: str, backend: Backend) -> Callable[..., Any]:
    """Return a product of this name, of the kernel or of its reference."""
    if backend.kernels == "reference":
        from pallas_kernels.sparse_ffn import reference

        return getattr(reference, f"{name}_reference")
    return partial(getattr(_kernels(), name), interpret=backend.kernels == "interpret")


def _flat(rows: Any, backend: Backend | None = None) -> Any:
    flat = rows.reshape(-1, rows.shape[-1])
    return flat if backend is None else flat.astype(jnp.dtype(backend.param_dtype))


def _array(kernel: Any) -> Any:
    return kernel.stack if isinstance(kernel, LayerView) else kernel


def _layer(kernel: Any) -> Any:
    return kernel.layer if isinstance(kernel, LayerView) else None


def _spec(kernel: Any, *axes: str | None) -> Any:
    if isinstance(kernel, LayerView):
        return LayerView(PartitionSpec(None, *axes), PartitionSpec())
    return PartitionSpec(*axes)
