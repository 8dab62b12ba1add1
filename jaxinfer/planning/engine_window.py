"""The engine's window of decoding, as it is compiled for a chip or a slice that is not here."""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.cache.slots import slots_for
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.programs import Pools, Rows, run_window
from jaxinfer.engine.row_axes import row_axes
from jaxinfer.engine.shapes import ANY_ENTRY, described_pools, described_rows, described_window, state_of
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.layers import expert_stacks
from jaxinfer.notation import TENSOR, Params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.parallel.groups import data_groups
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.partitioner import Partitioned, check_experts, partition
from jaxinfer.planning.compile import CompiledProgram, as_refusal, compile_one
from jaxinfer.planning.few_bits import check_planned, planned_weights
from jaxinfer.planning.placement import (
    any_layout,
    device_bytes,
    placed_params,
    placements,
    replicated,
)
from jaxinfer.planning.topology import chip_of, num_devices, topology_mesh
from jaxinfer.sampling.arrays import sampling_arrays
from jaxinfer.sampling.params import SamplingParams
from pallas_kernels.chips import Chip

PLAIN = Autoregressive()


@dataclass(frozen=True)
class EngineDeployment:
    """An engine to plan: texts of up to ``max_len`` tokens on pages of ``engine.page_size`` slots, decoded plainly.

    ``rows`` is how many texts decode together, None for as many as fit. The mesh may split heads (``tensor``), and rows
    with their pages into groups (``data``), each of which runs by itself.
    """

    config: DecoderConfig
    topology: str
    mesh: MeshConfig
    max_len: int
    rows: int | None = None
    dtype: str = "bfloat16"
    weights: str | None = None
    activations: str | None = None
    cache_dtype: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        choose_backend(self.dtype, platform="tpu", cache_dtype=self.cache_dtype, activations=self.activations)
        check_planned(self.activations, planned_weights(self.weights), self.config)
        count = num_devices(self.topology)
        if count != self.mesh.num_devices:
            raise InvalidOption(
                f"{self.topology} has {count} devices, but mesh {self.mesh} is of {self.mesh.num_devices}: "
                f"choose axes that multiply to {count}, or another topology"
            )
        if self.mesh.data * self.mesh.expert * self.mesh.tensor != count:
            raise InvalidOption(f"an engine's window splits over data, expert and tensor alone, not {self.mesh}")
        check_experts(self.config, self.mesh.expert)
        longest = self.config.longest_text
        if self.config.learned_positions is not None and longest is not None and self.max_len > longest:
            raise InvalidOption(f"max_len={self.max_len} exceeds the {longest} positions that the model has learned")

    @property
    def chip(self) -> Chip:
        """The chip of every device."""
        return chip_of(self.topology)

    @property
    def group(self) -> MeshConfig:
        """The mesh of a group, which has its own rows and pages."""
        return replace(self.mesh, data=1)

    @cached_property
    def split(self) -> Partitioned:
        """The decoder as it is split over the devices; on one of them it runs without a mesh, as engines do."""
        backend = choose_backend(self.dtype, platform="tpu", cache_dtype=self.cache_dtype, activations=self.activations)
        backend = replace(backend, rows_over_experts=False)
        return partition(self.config, backend, self.group.abstract if self.mesh.num_devices > 1 else None)

    @property
    def pages_per_row(self) -> int:
        """The pages of a text of ``max_len`` tokens, with the slots that a step writes past it."""
        return -(-self._num_slots // self.engine.page_size)

    @cached_property
    def page_bytes(self) -> int:
        """What one device holds of a page, in all layers."""
        return device_bytes(self.pools(1, self.group.abstract))

    @cached_property
    def weights_bytes(self) -> int:
        """What one device holds of the weights."""
        return device_bytes(self._weights)

    @cached_property
    def read_bytes(self) -> int:
        """The weights of one device that every step reads: of tables that are only looked up, a few rows."""
        params = self._weights
        tables = {"embed", "positions"} - ({"embed"} if self.config.tied_embeddings else set())
        return self.weights_bytes - sum(device_bytes(params[name]) for name in tables if name in params)

    def read_by(self, rows: int) -> int:
        """Return the weights that a step of so many rows is expected to read: of experts, those that a row goes to."""
        experts = self.config.experts
        if experts is None:
            return self.read_bytes
        stacks = device_bytes(expert_stacks(self._weights["blocks"]))
        return self.read_bytes - round(stacks * (1 - experts.share_read(rows)))

    def pages_for(self, rows: int) -> int:
        """Return how many pages a group needs for its part of so many rows, with the one that belongs to nobody."""
        return 1 + self.rows_each(rows) * self.pages_per_row

    def rows_each(self, rows: int) -> int:
        """Return how many of so many rows a group has at most."""
        return -(-rows // self.mesh.data)

    def params(self, mesh: Mesh | AbstractMesh) -> Params:
        """Describe the weights with their placement."""
        return placed_params(*self.split, mesh, planned_weights(self.weights))

    def pools(self, num_pages: int, mesh: Mesh | AbstractMesh) -> Pools:
        """Describe the pools with their placement: a device has the lanes of its heads of every page."""
        config, backend = self.split
        pools = described_pools(config, backend, num_pages, self.engine.page_size)
        where = NamedSharding(mesh, PartitionSpec(None, None, None, TENSOR))
        return jax.tree.map(lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=where), pools)

    def rows_of(self, batch: int) -> Rows:
        """Describe what is held of so many rows, between windows."""
        config, backend = self.split
        num_slots = slots_for(self._num_slots)

        def one_row() -> Any:
            arrays = sampling_arrays([SamplingParams()], [0], config.eos_token_ids, config.num_tokens)
            return state_of(ANY_ENTRY, arrays, num_slots, PLAIN.max_depth)

        one = jax.eval_shape(one_row)
        return described_rows(Decoder(config, backend), PLAIN, self._weights, one, batch, num_slots)

    @cached_property
    def _weights(self) -> Params:
        return self.params(self.group.abstract)

    @property
    def _num_slots(self) -> int:
        return self.max_len + step_headroom(PLAIN, self.split.backend)


def compile_window(asked: EngineDeployment, rows: int) -> CompiledProgram:
    """Compile a group's window of decoding, where all have so many rows together with their pages; allocate nothing.

    Raise DoesNotFit if the memory is too small, and InvalidOption if the program does not compile for the mesh.
    """
    devices = data_groups(topology_mesh(asked.topology, asked.mesh))[0]
    decoder, steps, each = Decoder(*asked.split), asked.engine.steps_per_look, asked.rows_each(rows)
    params, pools = asked.params(devices), asked.pools(asked.pages_for(rows), devices)
    held, told = (
        replicated(structs, devices) for structs in (asked.rows_of(each), described_window(each, asked.pages_per_row))
    )
    function = partial(run_window, decoder, PLAIN, row_axes(asked.rows_of), steps * (PLAIN.max_depth + 1))
    results = placements(pools), placements(held), NamedSharding(devices, PartitionSpec())
    arguments = params, PLAIN.parameters, pools, held, *told
    try:
        return compile_one(devices, function, arguments, (2, 3), any_layout(params), results, pools, {})
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            what = f"{rows} rows of {asked.max_len} tokens", "fewer rows or a smaller max_len"
            raise as_refusal(error, asked.topology, *what, {}) from error
        raise _uncompiled(asked, error) from error
    except (NotImplementedError, ValueError) as error:
        raise _uncompiled(asked, error) from error


def _uncompiled(asked: EngineDeployment, error: Exception) -> InvalidOption:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return InvalidOption(f"the engine's window does not compile for {asked.topology} as {asked.mesh}: {reason}")
