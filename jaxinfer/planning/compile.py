"""Compile the library's own prefill and decode for a TPU that is not here, and read what the compiler says."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.decoding.autoregressive import Autoregressive
from jaxinfer.decoding.programs import decode, prefill
from jaxinfer.decoding.state import DecodeState, initial_state
from jaxinfer.decoding.strategy import Prompt, Strategy
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, abstract_params, create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend, choose_backend
from jaxinfer.parallel.rules import CACHE_SPEC, check_split, parameter_shardings
from jaxinfer.planning.hlo_walk import Instruction, walk
from jaxinfer.planning.topology import chip_of, tensor_mesh, without_persistent_cache
from jaxinfer.sampling.arrays import sampling_arrays
from jaxinfer.sampling.params import SamplingParams


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler says of one program; all bytes are of one device.

    ``cache_bytes`` is the part of ``argument_bytes`` that holds keys and values; ``alias_bytes`` is what of the output
    is written over donated arguments; ``temporary_bytes`` is memory besides arguments and output. ``peak_bytes`` is
    the most in use at once and counts, unlike the others, what the program keeps in the chip's vector memory.
    ``parameter_formats`` is how the program wants the weights to lie on the devices.
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
        """Arguments, temporaries and what of the output is not written over arguments."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.alias_bytes

    @property
    def beyond_arguments_bytes(self) -> int:
        """The peak without the arguments: weights, cache and state are among those."""
        return self.peak_bytes - self.argument_bytes

    def instructions(self) -> list[Instruction]:
        """Return the program's instructions with the loops and branches around each."""
        return list(walk(self.hlo))

    def collectives(self) -> list[Instruction]:
        """Return the instructions that send data between devices."""
        return [instruction for instruction in self.instructions() if instruction.collective]


def compile_programs(
    config: DecoderConfig,
    topology: str,
    *,
    batch: int,
    max_len: int,
    tensor: int = 1,
    dtype: str = "bfloat16",
    prompt_tokens: int | None = 512,
    strategy: Strategy | None = None,
    compiler_options: Mapping[str, str | bool] | None = None,
) -> dict[str, CompiledProgram]:
    """Compile ``"prefill"`` and ``"decode"`` for a topology such as ``v5e:2x4``, allocating nothing.

    Weights and cache are split by heads over ``tensor`` devices, which are all that the topology has. ``max_len`` is
    the number of cache slots of a row, of which prefill fills ``prompt_tokens``; where that is None, only decode is
    compiled. Weights lie in memory in the order that decode's compiler chooses, in both programs. Raise InvalidOption
    where libtpu is missing, the topology does not exist, the model does not split or a program does not fit.
    """
    if prompt_tokens is not None and prompt_tokens > max_len:
        raise InvalidOption(f"prompt_tokens={prompt_tokens} exceeds max_len={max_len}: choose a shorter prompt")
    check_split(config, tensor)
    mesh = tensor_mesh(topology, tensor)
    strategy = strategy or Autoregressive()
    backend = dataclasses.replace(choose_backend(dtype, platform="tpu"), kv_shards=tensor, mesh=mesh)
    decoder = Decoder(config, backend)
    params = abstract_params(config, backend)
    shardings = parameter_shardings(config, backend, mesh)
    state = _abstract_state(config, backend, strategy, batch, max_len, mesh)
    described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), strategy.parameters)
    own = _replicated(described, mesh)
    memory = _replicated(
        jax.eval_shape(partial(_start, decoder, strategy, prompt_tokens or 1), params, own, state), mesh
    )
    max_steps = _replicated(jax.ShapeDtypeStruct((), jnp.int32), mesh)
    options = dict(compiler_options or {})
    try:
        # In the order of least padding, a shard that is no multiple of 128 long would be copied at every call.
        formats = jax.tree.map(lambda sharding: Format(Layout.AUTO, sharding), shardings)
        decoding = (_placed(params, shardings), own, state, memory, max_steps)
        function = partial(decode, decoder, strategy)
        programs = {"decode": _compile(mesh, function, decoding, (2, 3), formats, memory, options)}
        if prompt_tokens is not None:
            formats = programs["decode"].parameter_formats
            prefilling = (_placed(params, formats), own, state)
            function = partial(prefill, decoder, strategy, prompt_tokens)
            programs["prefill"] = _compile(mesh, function, prefilling, (2,), formats, memory, options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        available = chip_of(topology).device_hbm_bytes / 2**30
        raise InvalidOption(
            f"batch {batch} of {max_len} tokens does not fit into the {available:.4g} GiB of a {topology} device: "
            "use more devices, a smaller batch or a smaller max_len"
        ) from error
    return programs


def _compile(
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    donated: tuple[int, ...],
    formats: Params,
    memory: Any,
    options: dict[str, str | bool],
) -> CompiledProgram:
    """Compile one program as `Programs` runs it: state and memory are donated, and come back where they were."""
    state = arguments[2]
    placements = (formats, *_placements(arguments[1:]))
    began = time.perf_counter()
    # Kernels ask the context for the chip that they are compiled for, and for the mesh.
    with without_persistent_cache(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(
            function, donate_argnums=donated, in_shardings=placements, out_shardings=_placements((state, memory))
        )
        compiled = jitted.trace(*arguments).lower(lowering_platforms=("tpu",)).compile(compiler_options=options)
    analysis: Any = compiled.memory_analysis()
    return CompiledProgram(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temporary_bytes=analysis.temp_size_in_bytes,
        peak_bytes=analysis.peak_memory_in_bytes,
        cache_bytes=_device_bytes(state.cache),
        compile_seconds=time.perf_counter() - began,
        parameter_formats=compiled.input_formats[0][0],
        hlo=compiled.as_text() or "",
    )


def _start(decoder: Decoder, strategy: Strategy, num_tokens: int, params: Params, own: Any, state: DecodeState) -> Any:
    batch, width = state.lengths_B.shape[0], decoder.config.model_dim
    prompt = Prompt(jnp.zeros((batch, width), decoder.backend.compute_dtype), num_tokens)
    return strategy.start(Model(decoder, params), own, state, prompt)


def _abstract_state(
    config: DecoderConfig, backend: Backend, strategy: Strategy, batch: int, num_slots: int, mesh: Mesh
) -> DecodeState:
    """Describe a state of ``batch`` rows: the cache split by heads, all else on every device."""

    def build() -> DecodeState:
        cache = create_cache(config, batch, num_slots, backend, strategy.headroom)
        sampling = sampling_arrays([SamplingParams()] * batch, [0] * batch, config.eos_token_ids, config.vocab_size)
        return initial_state([[0]] * batch, [1] * batch, num_slots, strategy.max_depth, cache, sampling)

    state = jax.eval_shape(build)
    split = jax.tree.map(lambda _: NamedSharding(mesh, CACHE_SPEC), state.cache)
    return _replicated(state, mesh)._replace(cache=_placed(state.cache, split))


def _placed(structs: Any, placements: Any) -> Any:
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), structs, placements)


def _replicated(structs: Any, mesh: Mesh) -> Any:
    everywhere = NamedSharding(mesh, PartitionSpec())
    return _placed(structs, jax.tree.map(lambda _: everywhere, structs))


def _placements(placed: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, placed)


def _device_bytes(placed: Any) -> int:
    """Return what one device holds of placed structures."""
    leaves = jax.tree.leaves(placed)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
