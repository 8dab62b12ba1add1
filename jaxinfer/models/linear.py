"""Linear layers and tables as Linen modules; their parameters have logical axis names for sharding."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.models.active_columns import COLUMNS
from jaxinfer.models.adapters import ADAPTER, LOADED
from jaxinfer.models.layers import KERNEL, TRANSPOSED_KERNEL
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import Split
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.layer_view import LayerView
from jaxinfer.ops.logical_axes import mesh_spec
from jaxinfer.ops.low_rank import add_up, own_rows, project_down
from jaxinfer.ops.matmul import linear, linears
from jaxinfer.ops.rounding import rounded

# Linen's collection of what linear layers multiply; a pass that does not ask for it drops it while it is traced.
INPUTS = "linear_inputs"


class Linear(nn.Module):
    """A kernel ``[out, in]`` and an optional bias ``[out]``; ``axes`` are their logical names.

    If the backend transposes kernels, the kernel is ``[in, out]`` under another name. Parameters may also hold a
    low-rank ``"adapter"``, ``{"down": [R, in], "up": [out, R]}`` (LoRA, Hu et al., 2106.09685), which adds ``up down
    x`` for the tokens from `Backend.adapted_from` on, and loaded ones (`jaxinfer.models.adapters`), of which each row
    of ``adapters_B`` takes its own. A kernel may be any object that JAX can convert to an array
    (``__jax_array__``), or quantized, ``[out, in]`` in either case.
    """

    features: int
    axes: tuple[str | None, str | None]
    backend: Backend
    use_bias: bool = False

    def __call__(
        self, inputs: Float[Array, "*rows d_in"], adapters_B: Int[Array, " B"] | None = None
    ) -> Float[Array, "*rows d_out"]:
        return project(inputs, [self], adapters_B)[0]

    @property
    def split(self) -> Split:
        """The mesh axes that split outputs and inputs."""
        return tuple(mesh_spec(self.axes))

    @nn.compact
    def weights(self, width: int) -> tuple[Any, Any]:
        """Return the kernel, for inputs of width ``width``, and the bias, which may be None."""
        dtype = jnp.dtype(self.backend.param_dtype)
        transposed = self.backend.transposed_kernels
        quantized = quantized_parameter(self, KERNEL)
        kernel_init: Any = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        shape, axes = (self.features, width), self.axes
        if transposed:
            # Drawn as [out, in], so that a seed gives the same weights in both orders.
            draw, shape, axes = kernel_init, shape[::-1], axes[::-1]
            kernel_init = lambda key, shape, dtype: draw(key, shape[::-1], dtype).T  # noqa: E731
        kernel: Any = quantized if quantized is not None else viewed_parameter(self, KERNEL)
        if kernel is None:
            kernel = parameter(self, TRANSPOSED_KERNEL if transposed else KERNEL, kernel_init, axes, shape, dtype)
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, self.axes[:1], (self.features,), dtype)
        return kernel, bias

    def adapt(
        self, output: Float[Array, "*rows d_out"], inputs: Float[Array, "*rows d_in"]
    ) -> Float[Array, "*rows d_out"]:
        """Add the adapter's output, if there is an adapter."""
        if not self.has_variable("params", ADAPTER):
            return output
        return _adapted(output, inputs, self.get_variable("params", ADAPTER), self.backend, self.split)

    @property
    def columns(self) -> Any:
        """The kernel once more, ``[in, out]``; None if the parameters do not hold it (`models.active_columns`)."""
        return self.get_variable("params", COLUMNS) if self.has_variable("params", COLUMNS) else None

    @property
    def loaded(self) -> Any:
        """The stacks of loaded adapters, None if no adapter has a part in this layer."""
        return loaded_stacks(self)


def project(
    inputs: Float[Array, "*rows d_in"],
    layers: Sequence[Linear],
    adapters_B: Int[Array, " B"] | None = None,
    products: Callable[..., list[Any]] | None = None,
) -> list[Float[Array, "*rows _"]]:
    """Return the outputs of several linear layers of one module, backend and split for the same inputs.

    With ``adapters_B`` inputs are ``[B, T, d_in]``, and each row takes the loaded adapter of that number. ``products``
    are those of `jaxinfer.ops.matmul.linears`.
    """
    backend, split = layers[0].backend, layers[0].split
    assert all(layer.split == split for layer in layers)
    weights = [layer.weights(inputs.shape[-1]) for layer in layers]
    if products is None:
        weights = [(kernel.whole() if isinstance(kernel, LayerView) else kernel, bias) for kernel, bias in weights]
    for layer in layers:
        layer.sow(INPUTS, INPUTS, inputs)
    loaded = [None if adapters_B is None else layer.loaded for layer in layers]
    biases = [bias for _, bias in weights]
    # A gain is of the kernel's output alone.
    later = [each is not None and "gain" in each for each in loaded]
    weights = [(kernel, None if is_later else bias) for (kernel, bias), is_later in zip(weights, later)]
    outputs = linears(inputs, weights, backend, backend.transposed_kernels, split, products)
    if adapters_B is not None and any(each is not None for each in loaded):
        outputs = _with_own(outputs, inputs, loaded, biases, adapters_B, backend, split)
    return [layer.adapt(output, inputs) for layer, output in zip(layers, outputs)]


def _with_own(
    outputs: Sequence[Float[Array, "B T _"]],
    inputs: Float[Array, "B T d_in"],
    loaded: Sequence[Any],
    biases: Sequence[Any],
    adapters_B: Int[Array, " B"],
    backend: Backend,
    split: Split,
) -> list[Float[Array, "B T _"]]:
    """Add each row's own adapter to the outputs of layers; where there are gains, these are yet without biases."""
    ids_B, (out_axis, in_axis) = adapters_B - 1, split
    stacks = [each["down"] for each in loaded if each is not None and "down" in each]
    inner = iter(project_down(inputs, stacks, ids_B, backend, in_axis) if stacks else ())
    results = []
    for output, own, bias in zip(outputs, loaded, biases):
        if own is None:
            results.append(output)
            continue
        base = output
        if "gain" in own:
            base = gained(output, own, ids_B, backend)
            base = base if bias is None else (base + bias.astype(base.dtype)).astype(base.dtype)
        result = add_up(base, next(inner), own["up"], ids_B, backend, out_axis) if "up" in own else base
        results.append(shifted(result, own, ids_B))
    return results


def of_rows(stack: Any, ids_B: Int[Array, " B"], like: Float[Array, "B T O"]) -> jax.Array:
    """Return each row's own vector as ``[B, 1, O]``; what a row of a negative id gets means nothing."""
    return own_rows(stack, ids_B)[:, None].astype(like.dtype)


def gained(
    outputs_BTO: Float[Array, "B T O"], own: Any, ids_B: Int[Array, " B"], backend: Backend
) -> Float[Array, "B T O"]:
    """Multiply outputs by each row's own ``"gain"``, if there is one; rows of a negative id keep their bits."""
    if "gain" not in own:
        return outputs_BTO
    scaled = outputs_BTO * of_rows(own["gain"], ids_B, outputs_BTO)
    # Rounded before a bias or the adapter is added, whatever the program.
    scaled = rounded(scaled) if backend.platform == "cpu" else scaled
    return jnp.where((ids_B < 0)[:, None, None], outputs_BTO, scaled)


def shifted(outputs_BTO: Float[Array, "B T O"], own: Any, ids_B: Int[Array, " B"]) -> Float[Array, "B T O"]:
    """Add each row's own ``"shift"`` to its outputs, if there is one; rows of a negative id keep their bits."""
    if "shift" not in own:
        return outputs_BTO
    moved = outputs_BTO + of_rows(own["shift"], ids_B, outputs_BTO)
    return jnp.where((ids_B < 0)[:, None, None], outputs_BTO, moved)


def _adapted(
    output: Float[Array, "*rows d_out"],
    inputs: Float[Array, "*rows d_in"],
    adapter: Any,
    backend: Backend,
    split: Split,
) -> Float[Array, "*rows d_out"]:
    first, (out_axis, in_axis) = backend.adapted_from, split
    inner = linear(inputs[..., first:, :], adapter["down"], None, backend, split=(None, in_axis))
    added = linear(inner, adapter["up"], None, backend, split=(out_axis, None))
    if first:
        # Earlier tokens are concatenated, not increased by zeros: their values must not depend on whether adapters
        # exist.
        return jnp.concatenate([output[..., :first, :], output[..., first:, :] + added], axis=-2)
    return output + added


class Table(nn.Module):
    """A matrix ``[V, D]``, read whole or by rows; ``axes`` are the logical names of its axes."""

    shape: tuple[int, int]
    parameter: str
    backend: Backend
    axes: tuple[str | None, str] = ("vocab", "embed")

    @nn.compact
    def __call__(self) -> Float[Array, "V D"] | QuantizedArray:
        quantized = quantized_parameter(self, self.parameter)
        if quantized is not None:
            return quantized
        dtype = jnp.dtype(self.backend.param_dtype)
        init = nn.initializers.normal(0.02)
        return parameter(self, self.parameter, init, self.axes, self.shape, dtype)


def quantized_parameter(module: nn.Module, name: str) -> QuantizedArray | None:
    """Return a parameter that is quantized, None if it is not: flax knows no shape of it."""
    value = module.get_variable("params", name) if module.has_variable("params", name) else None
    return value if isinstance(value, QuantizedArray) else None


def viewed_parameter(module: nn.Module, name: str) -> LayerView | None:
    """Return a parameter that is read out of a stack, None if it is not."""
    value = module.get_variable("params", name) if module.has_variable("params", name) else None
    return value if isinstance(value, LayerView) else None


def loaded_stacks(module: nn.Module) -> Any:
    """Return the stacks of loaded adapters among a module's parameters, None if there are none."""
    return module.get_variable("params", LOADED) if module.has_variable("params", LOADED) else None


def parameter(
    module: nn.Module, name: str, init: Any, axes: tuple[str | None, ...], shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Declare a parameter with logical axis names; return the bare array."""
    return jnp.asarray(module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype))
