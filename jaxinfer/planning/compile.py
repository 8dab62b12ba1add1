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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.decoding.autoregressive import Autoregressive
from jaxinfer.decoding.programs import decode, prefill
from jaxinfer.decoding.state import DecodeState, initial_state
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, abstract_params, create_cache
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend, choose_backend
from jaxinfer.parallel.rules import CACHE_SPEC, check_split, parameter_formats
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
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    peak_bytes: int
    cache_bytes: int
    compile_seconds: float
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
    prompt_tokens: int = 512,
    strategy: Strategy | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> dict[str, CompiledProgram]:
    """Compile ``"prefill"`` and ``"decode"`` for a topology such as ``v5e:2x4``, allocating nothing.

    Weights and cache are split by heads over ``tensor`` devices, which are all that the topology has. ``max_len`` is
    the number of cache slots of a row, of which prefill fills ``prompt_tokens``. Raise InvalidOption where libtpu is
    missing, the topology does not exist, the model does not split or the program does not fit.
    """
    if prompt_tokens > max_len:
        raise InvalidOption(
            f"prompt_tokens={prompt_tokens} exceeds max_len={max_len}: a prompt must fit into the cache"
        )
    check_split(config, tensor)
    mesh = tensor_mesh(topology, tensor)
    strategy = strategy or Autoregressive()
    backend = dataclasses.replace(choose_backend(dtype, platform="tpu"), kv_shards=tensor)
    decoder = Decoder(config, backend)
    params = _placed(abstract_params(config, backend), parameter_formats(config, backend, mesh))
    state = _abstract_state(config, backend, strategy, batch, max_len, mesh)
    memory = _replicated(jax.eval_shape(strategy.start, params, state), mesh)
    max_steps = _replicated(jax.ShapeDtypeStruct((), jnp.int32), mesh)
    compile_one = partial(_compile, cache_bytes=_device_bytes(state.cache), options=dict(compiler_options or {}))
    try:
        return {
            "prefill": compile_one(partial(prefill, decoder, strategy, prompt_tokens), params, state, memory, ()),
            "decode": compile_one(partial(decode, decoder, strategy), params, state, memory, (memory, max_steps)),
        }
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        available = chip_of(topology).device_hbm_bytes / 2**30
        raise InvalidOption(
            f"batch {batch} of {max_len} tokens does not fit into the {available:.4g} GiB of a {topology} device: "
            "use more devices, a smaller batch or a smaller max_len"
        ) from error


def _compile(
    function: Callable[..., Any],
    params: Params,
    state: DecodeState,
    memory: Any,
    others: tuple[Any, ...],
    *,
    cache_bytes: int,
    options: dict[str, str],
) -> CompiledProgram:
    """Compile one program as `Programs` runs it: state and memory are donated, and come back where they were."""
    donated = (1, 2) if others else (1,)
    returned = jax.tree.map(lambda leaf: leaf.sharding, (state, memory))
    began = time.perf_counter()
    with without_persistent_cache():
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=returned)
        lowered = jitted.trace(params, state, *others).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile(compiler_options=options)
    analysis: Any = compiled.memory_analysis()
    return CompiledProgram(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temporary_bytes=analysis.temp_size_in_bytes,
        peak_bytes=analysis.peak_memory_in_bytes,
        cache_bytes=cache_bytes,
        compile_seconds=time.perf_counter() - began,
        hlo=compiled.as_text() or "",
    )


def _abstract_state(
    config: DecoderConfig, backend: Backend, strategy: Strategy, batch: int, num_slots: int, mesh: Mesh
) -> DecodeState:
    """Describe a state of ``batch`` rows: the cache split by heads, all else on every device."""

    def build() -> DecodeState:
        cache = create_cache(config, batch, num_slots, backend)
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


def _device_bytes(placed: Any) -> int:
    """Return what one device holds of placed structures."""
    leaves = jax.tree.leaves(placed)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
