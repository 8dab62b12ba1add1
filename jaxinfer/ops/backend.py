"""How the network runs on a device: the only place that derives choices from a platform and a dtype.

The choices are measured. On the CPU, XLA copies a layer's weights out of a stacked array before each product, which
halves decoding speed; so layers are unrolled over separate arrays. XLA's products of few rows are slow on the CPU, and
the bits of its results depend on the number of rows; so products, attention and norms use our own kernels there
(`jaxinfer.ops.cpu_kernels`), for any number of rows. Where these are not available, bfloat16
products are padded to a few rows, which XLA computes fast. Float32 kernels are then stored ``[in, out]``: for two rows
and more, XLA first rearranges a kernel stored ``[out, in]``, which takes as long as a product of one row. On a TPU a
scan keeps compile time constant and reads weights in place. A TPU stores a cache of 192 lanes per slot in another order
than its kernels read; with 256 lanes the order is right, and the memory is the same. Decode of SmolLM2-135M at batch 8
and 2,048 slots then moves 792 MB per step instead of 2,550 MB, and its prefill moves 43 times less.

Off the CPU, ``exact="bits"`` gives every step the same number of nodes (`jaxinfer.decoding.fixed_rows`). It is not the
default there: 16 nodes cost as little as one only while weights take longer to read than to multiply, which depends on
the batch and the vocabulary.

``jaxinfer bench latency --dtype float32,bfloat16`` measures the CPU's choices again, and ``jaxinfer plan --topology
v5e:1x1 --batch 8`` the TPU's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import InvalidOption
from jaxinfer.notation import PIPELINE, SEQUENCE
from jaxinfer.ops.cpu_kernels import machine_code
from jaxinfer.ops.rows_in_bytes import CACHE_DTYPES, holds_bytes, row_lanes
from jaxinfer.ops.sparsity import Sparsity

DTYPES = ("float32", "bfloat16", "float16", "float64")

Platform = Literal["cpu", "gpu", "tpu"]
Kernels = Literal["pallas", "interpret", "xla", "reference"]
Exact = Literal["bits", "margin"]
Exchange = Literal["gather", "all_to_all"]

# A v5e multiplies 240 rows of bfloat16 weights in the time that it takes to read them (197 Tflop/s over 819 GB/s): 16
# nodes are free for up to 15 sequences. They hold every strategy's default chain, and fill a tile of 16-bit rows.
_STEP_ROWS = 16


@dataclass(frozen=True)
class Backend:
    """Static facts of a run. Dtypes are NumPy names.

    ``param_dtype`` is the dtype of weights, ``compute_dtype`` of the residual stream, ``cache_dtype`` of keys and
    values: a float, or int8 or uint8 for rows in bytes (`jaxinfer.ops.rows_in_bytes`). ``scan_layers`` stacks the
    blocks' parameters and scans over them; otherwise each block has its own arrays. ``min_matmul_rows`` pads a product
    to that many rows. ``mesh`` are the devices that the model is split over; None is one device. Its axis ``tensor``
    splits the key/value heads into ``kv_shards`` parts, its axis ``pipeline`` the layers into ``stages`` parts.
    ``microbatches`` is the most parts that a batch is cut into for the stages (None: as many as are fastest). If heads
    are not split, the lanes of a cache are a multiple of ``lane_tile``. ``kernels`` says what works on a cache: Pallas
    kernels, the same interpreted on a CPU, plain XLA, or the kernels' ``reference``, which computes the correct results
    in float32. ``split_activations`` splits a prompt's tokens between the regions that split heads or features
    (`jaxinfer.ops.split_tokens`); None: only if the mesh splits them anyway. ``remat_layers`` makes a backward pass
    recompute each block instead of keeping its activations. ``adapted_from`` is the first token of a pass that adapters
    apply to (`jaxinfer.models.linear`). ``cpu_kernels`` says that products, attention, norms and sums over the
    vocabulary use the CPU kernels, whose results for a token have the same bits in any company; they also multiply
    drafters' rounded weights. Each device of a mesh runs them on its parts. Without a mesh they read rows of 16-bit
    tables and find the best token, too. ``step_rows`` is the number of nodes that a step is filled up to, or to a
    multiple of, where no kernels keep bits (`fixed_rows`). ``collectives`` is what devices send each other to add up
    activations: ``int8``, or None for what they are (`quantized_sums`). ``activations`` is what rows are rounded to
    before blocks' quantized kernels multiply them: ``int8`` (`rounded_products`), or None. ``sparsity`` says which
    features of a feed-forward layer are left out; None is none. With ``rows_over_experts`` the axis ``expert`` splits
    rows too, where it divides them (`jaxinfer.ops.logical_axes`), and ``exchange`` is how tokens then reach their
    experts; None: as their number asks for (`jaxinfer.ops.token_exchange`).
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
    cpu_kernels: bool = False
    step_rows: int = 1
    collectives: str | None = None
    activations: str | None = None
    sparsity: Sparsity | None = None
    rows_over_experts: bool = True
    exchange: Exchange | None = None

    @property
    def slot_shards(self) -> int:
        """The number of devices that split the slots of a dense cache and the tokens of a prompt."""
        return 1 if self.mesh is None else self.mesh.shape.get(SEQUENCE, 1)

    def cache_lanes(self, num_kv_heads: int, head_dim: int) -> int:
        """Return the lanes per slot of a cache with so many heads, padded with zeros to whole tiles.

        If heads are split there is no padding: each device would need its own zeros, between the heads. Rows in bytes
        have them there, for each device has scales of its own.
        """
        if holds_bytes(self.cache_dtype):
            own = row_lanes(num_kv_heads // self.kv_shards, head_dim)
            return -(-own // self.lane_tile) * self.lane_tile * self.kv_shards
        numbers = num_kv_heads * head_dim
        return -(-numbers // self.lane_tile) * self.lane_tile if self.kv_shards == 1 else numbers

    def on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return ``function`` so that each device of the mesh runs it on its parts of the arguments.

        Without a mesh it is unchanged. Inside a stage of a pipeline it gets the stage's parts.
        """
        if self.mesh is None:
            return function
        context = jax.sharding.get_abstract_mesh()
        # A program compiled for other devices has their mesh as its context, which also names the chip.
        mesh = None if context.axis_names else self.mesh
        axes = set((mesh or context).axis_names) - set(context.manual_axes)
        # A kernel's results do not say over which axes they vary.
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
        )

    def on_stages(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return ``function`` so that each pipeline stage runs it on its layers; the compiler handles other axes."""
        if self.stages == 1:
            return function
        mesh = None if jax.sharding.get_abstract_mesh().axis_names else self.mesh
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={PIPELINE}, check_vma=False
        )

    def constrained(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return an array that is split over the mesh by ``spec``."""
        # As in `on_devices`, the mesh of a program's context comes first.
        is_elsewhere = bool(jax.sharding.get_abstract_mesh().axis_names)
        where = spec if self.mesh is None or is_elsewhere else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(array, where)

    @property
    def splits_activations(self) -> bool:
        """Whether tokens are split between the regions that split heads or features."""
        return self.slot_shards > 1 if self.split_activations is None else self.split_activations

    @property
    def keeps_bits(self) -> bool:
        """Whether a token's logits have the same bits in any company; ask the backend of a partitioned decoder."""
        vectors = machine_code.host_vectors() if self.cpu_kernels else None
        return self.kernels == "xla" and vectors is not None and self.param_dtype in vectors.dtypes

    @property
    def fixed_rows(self) -> int:
        """The number of nodes of every step, or a divisor of it; 1 if steps may have any number of them."""
        return 1 if self.keeps_bits else self.step_rows

    @property
    def reads_live_blocks(self) -> bool:
        """Whether steps leave out features by a TPU's kernel, which reads layers where they lie (`live_blocks`)."""
        return self.sparsity is not None and self.platform == "tpu" and self.kernels != "xla"

    @property
    def transposed_kernels(self) -> bool:
        """Whether the blocks' kernels are stored ``[in, out]`` instead of ``[out, in]``."""
        by_xla = self.platform == "cpu" and not self.scan_layers and not self.cpu_kernels
        return by_xla and jnp.dtype(self.param_dtype).itemsize > 2

    @property
    def has_free_rows(self) -> bool:
        """Whether a pass over a few tokens takes about as long as a pass over one."""
        return self.platform != "cpu" or (self.min_matmul_rows > 1 and not self.cpu_kernels)

    @property
    def precision(self) -> jax.lax.Precision:
        """The precision of every product: exact in float32, which a TPU would round to bfloat16 by default."""
        exact = self.compute_dtype in ("float32", "float64") and self.param_dtype == self.compute_dtype
        return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def default_platform() -> Platform:
    """Return the platform that JAX uses in this process."""
    try:
        name = jax.default_backend()
    except (RuntimeError, ValueError) as error:  # a platform that JAX does not know, or that is not here
        known = "; unset JAX_PLATFORMS, or set it to cpu" if jax.config.jax_platforms else ""  # pyright: ignore[reportAttributeAccessIssue]
        raise InvalidOption(f"JAX finds no device: {error}{known}") from error
    return {"cpu": "cpu", "tpu": "tpu"}.get(name, "gpu")  # pyright: ignore[reportReturnType]


def default_dtype(platform: Platform) -> str:
    """Return the default dtype of a model."""
    return "float32" if platform == "cpu" else "bfloat16"


def choose_backend(
    dtype: str | None = None,
    platform: Platform | None = None,
    scan_layers: bool | None = None,
    kernels: Kernels | None = None,
    exact: str | None = None,
    cache_dtype: str | None = None,
    collectives: str | None = None,
    activations: str | None = None,
) -> Backend:
    """Choose how a model with weights in ``dtype`` runs on ``platform``; by default, this process's.

    ``kernels`` says what works on a cache; by default, Pallas kernels on a TPU and XLA elsewhere. ``exact`` says what
    strategies share with plain decoding: ``bits``, or the tokens wherever their ``margin`` is larger than rounding
    (default). Where the CPU kernels run, they share all bits in either case. ``cache_dtype`` rounds keys and values to
    8 bits, ``int8`` or ``fp8``; by default, they are as wide as what the model computes with, and on a CPU in float16
    where weights have 16 bits. With ``collectives`` ``int8`` the devices of a mesh send each other bytes where they add
    up activations. With ``activations`` ``int8`` quantized kernels multiply rows in bytes.
    """
    for name, value in (("exact", exact), ("dtype", dtype), ("cache_dtype", cache_dtype), ("collectives", collectives)):
        if value is not None and not isinstance(value, str):
            raise InvalidOption(f"{name} {value!r} is not a text")
    if exact is not None and exact not in get_args(Exact):
        raise InvalidOption(f"unknown exactness {exact!r}; use one of {', '.join(get_args(Exact))}")
    platform = platform or default_platform()
    dtype = dtype or default_dtype(platform)
    if dtype not in DTYPES:
        raise InvalidOption(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    if dtype == "float64" and jax.dtypes.canonicalize_dtype(dtype) != jnp.float64:
        raise InvalidOption("dtype float64 needs JAX's 64-bit mode: jax.config.update('jax_enable_x64', True)")
    check_cache_dtype(cache_dtype, dtype, platform)
    if collectives not in (None, "int8"):
        raise InvalidOption(f"unknown collectives {collectives!r}; use int8, or none")
    check_activations(activations)
    on_cpu = platform == "cpu"
    wide = on_cpu and jnp.dtype(dtype).itemsize == 2
    unrolled = on_cpu if scan_layers is None else not scan_layers
    # A scan would copy each layer's weights for the kernels too.
    cpu_kernels = on_cpu and unrolled and machine_code.host_vectors() is not None
    return Backend(
        platform=platform,
        param_dtype=dtype,
        compute_dtype="float32" if wide else dtype,
        cache_dtype=CACHE_DTYPES[cache_dtype] if cache_dtype else _short_floats(cpu_kernels) if wide else dtype,
        scan_layers=not unrolled,
        min_matmul_rows=4 if wide else 1,
        cpu_kernels=cpu_kernels,
        lane_tile=128 if platform == "tpu" else 1,
        kernels=kernels or ("pallas" if platform == "tpu" else "xla"),
        step_rows=_STEP_ROWS if exact == "bits" else 1,
        collectives=collectives,
        activations=activations,
    )


def _short_floats(cpu_kernels: bool) -> str:
    """Return in which floats a CPU keeps keys and values of a model in 16 bits, which it computes in float32.

    To write a few numbers of bfloat16, XLA rewrites the whole cache. float16 it writes where they belong, and a
    kernel that reads half as many bytes is nearly twice as fast; keys and values are far from what float16 cannot hold.
    """
    vectors = machine_code.host_vectors()
    return "float16" if cpu_kernels and vectors is not None and "float16" in vectors.dtypes else "float32"


def check_activations(activations: str | None) -> None:
    """Refuse what rows are not rounded to."""
    if activations not in (None, "int8"):
        raise InvalidOption(f"unknown activations {activations!r}; use int8, or none")


def check_cache_dtype(cache_dtype: str | None, dtype: str, platform: Platform) -> None:
    """Refuse what no cache is kept in, and what the model's dtype or the platform does not go with."""
    if cache_dtype is None:
        return
    if cache_dtype not in CACHE_DTYPES:
        raise InvalidOption(f"unknown cache_dtype {cache_dtype!r}; use {' or '.join(CACHE_DTYPES)}, or none")
    if dtype == "float64":
        raise InvalidOption(f"cache_dtype {cache_dtype} is not for float64, of which 8 bits keep nothing: leave it out")
    if cache_dtype == "fp8" and platform == "tpu":
        raise InvalidOption("cache_dtype fp8 is not for TPUs, of which v5e and v6e have no such floats: use int8")
