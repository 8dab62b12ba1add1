"""The subject of a plan: a model on the devices of a topology, with a batch size and a length."""

from dataclasses import dataclass
from functools import cached_property

from jaxinfer.cache.slots import slots_for
from jaxinfer.checkpoint.few_bits import FewBits
from jaxinfer.decoding.batch import prompt_bucket
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.programs import PREFILL_CHUNK
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.errors import InvalidOption
from jaxinfer.model_sparsity import check_sparsity
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.stages import check_stages
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.logical_axes import filled_rows
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.partitioner import Partitioned, check_experts
from jaxinfer.planning.compile import CompiledProgram, check_mesh, compile_programs, split_decoder
from jaxinfer.planning.few_bits import check_planned, planned_weights
from jaxinfer.planning.given_tree import GivenTree
from jaxinfer.planning.placement import placed_params
from jaxinfer.planning.strategies import planned_strategy
from jaxinfer.planning.topology import chip_of, num_devices
from pallas_kernels.chips import Chip


@dataclass(frozen=True)
class Deployment:
    """A model, its devices and its load.

    ``max_len`` is the most tokens of a row, prompt and output together; prefill is planned for ``prompt_tokens`` of
    them. ``weights``, ``activations``, ``collectives``, ``exact``, ``cache_dtype`` and ``sparsity`` are as in
    `jaxinfer.load`; ``live_share`` is how many of the blocks of 128 features are live in a step, of all its rows. A
    ``strategy`` other than plain decoding (see `planned_strategy`) adds the plan of its step. ``nodes`` adds instead
    the plan of a step that verifies any tree of so many nodes.
    """

    config: DecoderConfig
    topology: str
    mesh: MeshConfig
    batch: int
    max_len: int
    prompt_tokens: int = PREFILL_CHUNK
    dtype: str = "bfloat16"
    weights: str | None = None
    activations: str | None = None
    collectives: str | None = None
    exact: str | None = None
    cache_dtype: str | None = None
    sparsity: str | None = None
    live_share: float = 1.0
    strategy_spec: str = Autoregressive.name
    nodes: int = 0

    def __post_init__(self) -> None:
        count = num_devices(self.topology)
        if count != self.mesh.num_devices:
            raise InvalidOption(
                f"{self.topology} has {count} devices, but mesh {self.mesh} is of {self.mesh.num_devices}: "
                f"choose axes that multiply to {count}, or another topology"
            )
        check_mesh(self.mesh, self.batch)
        check_stages(self.config, self.mesh.pipeline)
        check_experts(self.config, self.mesh.expert)
        if self.exceeds_context and self.config.learned_positions is not None:
            raise InvalidOption(
                f"max_len={self.max_len} exceeds the {self.config.longest_text} positions that the model has learned"
            )
        if not 0 < self.prompt_tokens <= self.max_len:
            raise InvalidOption(f"prompt_tokens={self.prompt_tokens} exceeds max_len={self.max_len}")
        if self.prompt_tokens > PREFILL_CHUNK and self.prompt_tokens & (self.prompt_tokens - 1):
            raise InvalidOption(f"prompt_tokens={self.prompt_tokens}: past {PREFILL_CHUNK} name a power of two")
        if self.nodes and self.strategy_spec != Autoregressive.name:
            raise InvalidOption("strategy and nodes both say what to verify: give one of them")
        check_planned(self.activations, self.few_bits, self.config)
        check_sparsity(self.config, self.split.backend, self.mesh.abstract, self.few_bits)
        if not 0 < self.live_share <= 1:
            raise InvalidOption(f"live_share={self.live_share:g} is no share of blocks: choose more than 0, at most 1")
        if self.live_share < 1 and self.sparsity is None:
            raise InvalidOption("live_share says which part of a sparse step's blocks is read: name a sparsity too")
        if self.few_bits is not None:
            placed_params(*self.split, self.mesh.abstract, self.few_bits)
        choose_backend(self.dtype, platform="tpu", exact=self.exact, cache_dtype=self.cache_dtype)
        self.strategy.check_slots(self.num_slots)

    @property
    def exceeds_context(self) -> bool:
        """Whether sequences exceed the model's own context length. This does not change the costs."""
        return self.config.longest_text is not None and self.max_len > self.config.longest_text

    @property
    def chip(self) -> Chip:
        """The chip of every device."""
        return chip_of(self.topology)

    @property
    def rows(self) -> int:
        """The rows that run: those of the batch, and those that fill it up until it splits over ``expert``."""
        return filled_rows(self.batch, self.mesh.abstract)

    @property
    def num_slots(self) -> int:
        """Cache slots per row."""
        needed = slots_for(self.max_len + step_headroom(self.strategy, self.split.backend))
        return max(needed, self.padded_prompt_tokens)

    @property
    def padded_prompt_tokens(self) -> int:
        """The tokens of a prompt, with those that fill its last chunk where chunks have one size."""
        backend = self.split.backend
        return self.prompt_tokens if backend.fixed_rows == 1 else prompt_bucket(self.prompt_tokens, backend)

    @cached_property
    def split(self) -> Partitioned:
        """The decoder as it is split over the devices, padded where it does not split evenly."""
        asked = self.exact, self.cache_dtype, self.collectives, self.activations, self.sparsity
        return split_decoder(self.config, self.mesh, self.dtype, *asked)

    @cached_property
    def few_bits(self) -> FewBits | None:
        """What kernels are in few bits, and in which; None for kernels in ``dtype``."""
        return planned_weights(self.weights)

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy, with shapes in place of weights."""
        if self.nodes:
            return GivenTree(self.nodes)
        return planned_strategy(self.strategy_spec, self.config, self.mesh, self.dtype)

    @property
    def speculates(self) -> bool:
        """Whether there is a step besides plain decoding's."""
        return not isinstance(self.strategy, Autoregressive)

    def compile(self, strategy: Strategy | None = None) -> dict[str, CompiledProgram]:
        """Compile plain decoding and prefill, or the strategy's step only; see `compile_programs`."""
        return compile_programs(
            self.config,
            self.topology,
            batch=self.rows,
            max_len=self.num_slots,
            mesh=self.mesh,
            dtype=self.dtype,
            weights=self.weights,
            activations=self.activations,
            collectives=self.collectives,
            exact=self.exact,
            cache_dtype=self.cache_dtype,
            sparsity=self.sparsity,
            prompt_tokens=self.padded_prompt_tokens if strategy is None else None,
            strategy=strategy,
        )
