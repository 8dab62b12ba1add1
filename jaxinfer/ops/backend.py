"""How the network runs on a device: the one place that turns a platform and a dtype into choices.

The choices are measured. On the CPU, XLA copies a layer's weights out of a stacked array before each product, which
halves decoding speed, so layers are unrolled over separate arrays; and its products of few rows are slow, so that they
go, with attention, to kernels of our own (`jaxinfer.ops.cpu_kernels`). Where these cannot be had, bfloat16 products are
padded to a few rows, from which on XLA's are fast, and float32 kernels are stored ``[in, out]``, since XLA's products
of two rows and more first rearrange one stored ``[out, in]``, which takes as long again as a product of one row. On a
TPU a scan keeps compile time flat and reads weights in place. There a cache of 192 numbers a slot lies in another order
than its kernels read, unless it has 256 lanes, which it takes in memory in any case: decode of SmolLM2-135M at batch 8
and 2,048 slots moves 792 MB a step with them, 2,550 MB without, and its prefill 43 times less.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import InvalidOption
from jaxinfer.notation import PIPELINE, SEQUENCE
from jaxinfer.ops.cpu_kernels import machine_code, products

DTYPES = ("float32", "bfloat16", "float16", "float64")

Platform = Literal["cpu", "gpu", "tpu"]
Kernels = Literal["pallas", "interpret", "xla", "reference"]


@dataclass(frozen=True)
class Backend:
    """Static facts of a run. Dtypes are NumPy names.

    ``param_dtype`` is what weights are stored in, ``compute_dtype`` the residual stream, ``cache_dtype`` the keys and
    values. ``scan_layers`` stacks the blocks' parameters and scans over them; otherwise each block has arrays of its
    own. ``min_matmul_rows`` pads a product's rows up to that many. ``mesh`` are the devices that the model is split
    over, of which those along its axis ``tensor`` have ``kv_shards`` parts of the key/value heads; None is one device.
    ``stages`` is how many devices along its axis ``pipeline`` have a part of the layers each, ``microbatches`` into how
    many parts a batch is cut for them at the most (None: as many as take the least time). A cache's lanes are whole
    multiples of ``lane_tile`` where the heads are not split. ``kernels`` is what works on a cache: Pallas kernels, the
    same interpreted on a CPU, plain XLA, or the kernels' ``reference``, which computes in float32 what defines correct.
    ``split_activations`` has the tokens of a prompt split between the regions that split heads or features, as
    `jaxinfer.ops.split_tokens` tells; None: where a prompt's tokens are split in any case. ``remat_layers`` has a
    backward pass compute each block anew instead of keeping its activations. ``adapted_from`` is the first token of a
    pass that adapters beside kernels act on (`jaxinfer.models.linear`). The products and the attention of a pass over
    at most ``kernel_rows`` tokens go to the CPU's own kernels, and for any number of tokens rows of 16-bit tables, the
    search for the best token and what drafters have rounded; 0 where there are none.
    """

    platform: Platform
    param_dtype: str
    compute_dtype: str
    cache_dtype: str
    scan_layers: bool
    min_matmul_rows: int = 1
    lane_tile: int = 1
    kv_shards: int = 1
    kernels: Kernels = "xla"
    mesh: Mesh | AbstractMesh | None = None
    stages: int = 1
    microbatches: int | None = None
    split_activations: bool | None = None
    remat_layers: bool = False
    adapted_from: int = 0
    kernel_rows: int = 0

    @property
    def slot_shards(self) -> int:
        """Over how many devices the slots of a dense cache, and the tokens of a prompt, are split."""
        return 1 if self.mesh is None else self.mesh.shape.get(SEQUENCE, 1)

    def cache_lanes(self, numbers: int) -> int:
        """Return how many lanes a cache has for so many numbers a slot; zeros fill up what a device would leave empty.

        Where heads are split, each device would need zeros of its own, between the heads.
        """
        return -(-numbers // self.lane_tile) * self.lane_tile if self.kv_shards == 1 else numbers

    def on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return ``function`` as each device of the mesh runs it on its parts of the arguments.

        Inside a stage of a pipeline, ``function`` meets what the stage has.
        """
        context = jax.sharding.get_abstract_mesh()
        # A program that is compiled for devices elsewhere has their mesh as its context, which names the chip too.
        mesh = None if context.axis_names else self.mesh
        axes = set((mesh or context).axis_names) - set(context.manual_axes)
        # What a kernel returns does not say on which axes it varies.
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
        )

    def on_stages(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return ``function`` as each stage of a pipeline runs it on its layers, other axes left to the compiler."""
        if self.stages == 1:
            return function
        mesh = None if jax.sharding.get_abstract_mesh().axis_names else self.mesh
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={PIPELINE}, check_vma=False
        )

    def constrained(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return an array that is split over the mesh as ``spec`` says."""
        # As in `on_devices`: the mesh of a program's context comes first.
        is_elsewhere = bool(jax.sharding.get_abstract_mesh().axis_names)
        where = spec if self.mesh is None or is_elsewhere else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(array, where)

    @property
    def splits_activations(self) -> bool:
        """Whether tokens are split between the regions that split heads or features."""
        return self.slot_shards > 1 if self.split_activations is None else self.split_activations

    @property
    def transposed_kernels(self) -> bool:
        """Whether the blocks' kernels are stored ``[in, out]`` instead of ``[out, in]``."""
        by_xla = self.platform == "cpu" and not self.scan_layers and not self.kernel_rows
        return by_xla and jnp.dtype(self.param_dtype).itemsize > 2

    @property
    def has_free_rows(self) -> bool:
        """Whether a pass over a few tokens takes about as long as one over a single token."""
        return self.platform != "cpu" or (self.min_matmul_rows > 1 and not self.kernel_rows)

    @property
    def precision(self) -> jax.lax.Precision:
        """The precision of every product: exact in float32, which a TPU would otherwise round to bfloat16."""
        exact = self.compute_dtype in ("float32", "float64") and self.param_dtype == self.compute_dtype
        return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def default_platform() -> Platform:
    """Return the platform that JAX computes on in this process."""
    name = jax.default_backend()
    return {"cpu": "cpu", "tpu": "tpu"}.get(name, "gpu")  # pyright: ignore[reportReturnType]


def default_dtype(platform: Platform) -> str:
    """Return the dtype that a model runs in where the user names none."""
    return "float32" if platform == "cpu" else "bfloat16"


def choose_backend(
    dtype: str | None = None,
    platform: Platform | None = None,
    scan_layers: bool | None = None,
    kernels: Kernels | None = None,
) -> Backend:
    """Choose how a model of weights in ``dtype`` runs on ``platform``, both by default those of this process.

    ``kernels`` forces what works on a cache: Pallas kernels on a TPU and XLA elsewhere, unless given.
    """
    platform = platform or default_platform()
    dtype = dtype or default_dtype(platform)
    if dtype not in DTYPES:
        raise InvalidOption(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    if dtype == "float64" and jax.dtypes.canonicalize_dtype(dtype) != jnp.float64:
        raise InvalidOption("dtype float64 needs JAX's 64-bit mode: jax.config.update('jax_enable_x64', True)")
    on_cpu = platform == "cpu"
    wide = on_cpu and jnp.dtype(dtype).itemsize == 2
    unrolled = on_cpu if scan_layers is None else not scan_layers
    # A scan would have each layer's weights copied for the kernels too.
    kernel_rows = products.MAX_ROWS if on_cpu and unrolled and machine_code.host_vectors() else 0
    return Backend(
        platform=platform,
        param_dtype=dtype,
        compute_dtype="float32" if wide else dtype,
        # XLA's CPU backend rewrites a whole cache of 16-bit numbers to put a few into it, so that it is float32 there.
        cache_dtype="float32" if wide else dtype,
        scan_layers=not unrolled,
        min_matmul_rows=4 if wide else 1,
        kernel_rows=kernel_rows,
        lane_tile=128 if platform == "tpu" else 1,
        kernels=kernels or ("pallas" if platform == "tpu" else "xla"),
    )
