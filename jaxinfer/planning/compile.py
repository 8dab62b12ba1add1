"""Compiles prefill and decode for a TPU that is not attached, and reads the compiler's memory analysis and HLO."""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.decoding.programs import decode, prefill
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategy import Prefilled, Strategy
from jaxinfer.errors import InvalidOption
from jaxinfer.jax_setup import without_persistent_cache
from jaxinfer.model_sparsity import check_sparsity
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.models.stages import check_stages
from jaxinfer.notation import Params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.sparsity import Sparsity, parse_sparsity
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.partitioner import Partitioned, check_axes, check_experts, partition
from jaxinfer.planning.few_bits import planned_weights
from jaxinfer.planning.hlo.walk import Instruction, walk
from jaxinfer.planning.placement import (
    any_layout,
    device_bytes,
    placed,
    placed_batch,
    placed_drafter_params,
    placed_params,
    placed_state,
    placements,
    replicated,
)
from jaxinfer.planning.topology import chip_of, topology_mesh
from jaxinfer.sampling.params import SamplingParams

SINGLE = MeshConfig()
# What a compiled program calls the kernel of `pallas_kernels.sparse_ffn`.
SPARSE_KERNEL = "sparse_ffn"
_USED = re.compile(r"(?:Used |\()([\d.]+)([KMGT]?)(?: of|\) exceeds available)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class CompiledProgram:
    """The compiler's account of one program; all bytes are per device.

    ``cache_bytes`` is the part of ``argument_bytes`` that holds keys and values. ``alias_bytes`` is the part of the
    output that overwrites donated arguments. ``temporary_bytes`` excludes arguments and output. ``peak_bytes`` is the
    largest use at any time; unlike the others it includes the chip's vector memory. ``parameter_formats`` is the memory
    layout that the program wants for the weights.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    cache_bytes: int
    compile_seconds: float
    parameter_formats: Params = dataclasses.field(repr=False)
    hlo: str = dataclasses.field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Arguments, temporaries, and the part of the output that does not overwrite arguments."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.alias_bytes

    @property
    def beyond_arguments_bytes(self) -> int:
        """The peak without the arguments, which include weights, cache and state."""
        return self.peak_bytes - self.argument_bytes

    def instructions(self, inner_trips: int = 1) -> list[Instruction]:
        """Return the program's instructions, each with its number of enclosing loops and branches; see `walk`."""
        return list(walk(self.hlo, inner_trips))

    def block_products(self, inner_trips: int = 1) -> list[Instruction]:
        """Return the kernels that read live blocks alone; their bytes and operations are those of all blocks."""
        instructions = self.instructions(inner_trips=inner_trips)
        return [instruction for instruction in instructions if instruction.name.startswith(SPARSE_KERNEL)]

    def collectives(self) -> list[Instruction]:
        """Return the instructions that send data between devices."""
        return [instruction for instruction in self.instructions() if instruction.collective]


class DoesNotFit(InvalidOption):
    """A program needs more memory than a device has.

    ``required_bytes`` is the compiler's count, None if it gave none; ``compiled`` holds the programs that fit.
    """

    def __init__(self, message: str, required_bytes: int | None, compiled: dict[str, CompiledProgram]) -> None:
        super().__init__(message)
        self.required_bytes = required_bytes
        self.compiled = compiled


def compile_programs(
    config: DecoderConfig,
    topology: str,
    *,
    batch: int,
    max_len: int,
    mesh: MeshConfig = SINGLE,
    dtype: str = "bfloat16",
    weights: str | None = None,
    activations: str | None = None,
    collectives: str | None = None,
    exact: str | None = None,
    cache_dtype: str | None = None,
    prompt_tokens: int | None = 512,
    strategy: Strategy | None = None,
    sampling: SamplingParams | None = None,
    split_activations: bool | None = None,
    compiler_options: Mapping[str, str | bool] | None = None,
    sparsity: str | Sparsity | None = None,
) -> dict[str, CompiledProgram]:
    """Compile ``"prefill"`` and ``"decode"`` for a topology such as ``v5e:2x4``; allocate nothing.

    The mesh's data axis splits rows, its tensor axis splits weights and cache by heads, its sequence axis splits
    prompts and slots. ``max_len`` is the number of cache slots per row; prefill fills ``prompt_tokens`` of them. If
    ``prompt_tokens`` is None, only decode is compiled. Both programs use the weight layout that decode's compiler
    chooses. Every row has the ``sampling``, whose grammar, if it has one, is a `TokenTable`. ``weights``, ``exact``,
    ``activations``, ``collectives``, ``cache_dtype`` and ``sparsity`` are as in `jaxinfer.load`, which refuses the same
    combinations; the compiler counts a sparse step's blocks as if all were live. ``split_activations`` is as in
    `Backend`. Raise InvalidOption if libtpu is missing, the topology does not exist, the model does
    not split or a program does not fit.
    """
    check_mesh(mesh, batch)
    check_stages(config, mesh.pipeline)
    check_experts(config, mesh.expert)
    if prompt_tokens is not None and prompt_tokens > max_len:
        raise InvalidOption(f"prompt_tokens={prompt_tokens} exceeds max_len={max_len}: choose a shorter prompt")
    strategy, few_bits = strategy or Autoregressive(), planned_weights(weights)
    split = split_decoder(config, mesh, dtype, exact, cache_dtype, collectives, activations, sparsity)
    check_sparsity(config, split.backend, mesh.abstract, few_bits)
    config, backend = split
    devices = topology_mesh(topology, mesh)
    backend = dataclasses.replace(backend, split_activations=split_activations)
    decoder = Decoder(config, backend)
    params = placed_params(config, backend, devices, few_bits)
    state = placed_state(config, backend, strategy, batch, max_len, devices, sampling)
    drafter_params = placed_drafter_params(strategy, devices)
    memory = jax.eval_shape(partial(_start, decoder, strategy, prompt_tokens or 1), params, drafter_params, state)
    memory = placed_batch(memory, devices)
    max_steps = replicated(jax.ShapeDtypeStruct((), jnp.int32), devices)
    options = dict(compiler_options or {})
    programs: dict[str, CompiledProgram] = {}
    try:
        formats = any_layout(params)
        decoding = (params, drafter_params, state, memory, max_steps)
        function = partial(decode, decoder, strategy)
        results = placements((state, memory))
        programs["decode"] = compile_one(devices, function, decoding, (2, 3), formats, results, state.cache, options)
        if prompt_tokens is not None:
            formats = programs["decode"].parameter_formats
            prefilling = (placed(params, formats), drafter_params, state)
            function = partial(prefill, decoder, strategy, prompt_tokens)
            programs["prefill"] = compile_one(
                devices, function, prefilling, (2,), formats, results, state.cache, options
            )
    except jax.errors.JaxRuntimeError as error:
        what = f"batch {batch} of {max_len} tokens", "a smaller batch or a smaller max_len"
        raise as_refusal(error, topology, *what, programs) from error
    return programs


def as_refusal(
    error: Exception, topology: str, what: str, instead: str, compiled: dict[str, CompiledProgram]
) -> DoesNotFit:
    """Return the refusal that a compiler's error means; raise the error if memory is not what is missing."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    available = chip_of(topology).device_hbm_bytes / 2**30
    used = _USED.search(str(error))
    return DoesNotFit(
        f"{what} does not fit into the {available:.4g} GiB of a {topology} device: use more devices, {instead}",
        int(float(used[1]) * _UNITS[used[2]]) if used else None,
        compiled,
    )


def split_decoder(
    config: DecoderConfig,
    mesh: MeshConfig,
    dtype: str,
    exact: str | None = None,
    cache_dtype: str | None = None,
    collectives: str | None = None,
    activations: str | None = None,
    sparsity: str | Sparsity | None = None,
) -> Partitioned:
    """Return the decoder as it is split over the devices of a TPU mesh."""
    backend = choose_backend(
        dtype,
        platform="tpu",
        exact=exact,
        cache_dtype=cache_dtype,
        collectives=collectives,
        activations=activations,
    )
    return partition(config, dataclasses.replace(backend, sparsity=parse_sparsity(sparsity)), mesh.abstract)


def check_mesh(mesh: MeshConfig, batch: int) -> None:
    """Raise InvalidOption if programs cannot be compiled for the mesh, or if the batch does not split over it."""
    check_axes(mesh.pipeline, mesh.sequence)
    if batch % mesh.data:
        raise InvalidOption(
            f"a batch of {batch} does not split over data={mesh.data} devices: choose a multiple of {mesh.data}"
        )


def compile_one(
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    donated: tuple[int, ...],
    formats: Params,
    results: Any,
    cache: Any,
    options: dict[str, str | bool],
) -> CompiledProgram:
    """Compile one program as `Programs` runs it: what is donated keeps its placement.

    The first argument are the weights, whose layouts are ``formats``; ``results`` are the placements of what it
    returns, ``cache`` the keys and values among the arguments.
    """
    where = (formats, *placements(arguments[1:]))
    began = time.perf_counter()
    # Kernels read from this context which chip they are compiled for.
    with without_persistent_cache(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(function, donate_argnums=donated, in_shardings=where, out_shardings=results)
        compiled = jitted.trace(*arguments).lower(lowering_platforms=("tpu",)).compile(compiler_options=options)
    analysis: Any = compiled.memory_analysis()
    return CompiledProgram(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temporary_bytes=analysis.temp_size_in_bytes,
        peak_bytes=analysis.peak_memory_in_bytes,
        cache_bytes=device_bytes(cache),
        compile_seconds=time.perf_counter() - began,
        parameter_formats=compiled.input_formats[0][0],
        hlo=compiled.as_text() or "",
    )


def _start(
    decoder: Decoder, strategy: Strategy, num_tokens: int, params: Params, drafter_params: Any, state: DecodeState
) -> Any:
    batch, width = state.lengths_B.shape[0], decoder.config.model_dim
    prefilled = Prefilled(jnp.zeros((batch, width), decoder.backend.compute_dtype), num_tokens)
    return strategy.start(Model(decoder, params), drafter_params, state, prefilled)
