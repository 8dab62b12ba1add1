"""Speculative decoding with a smaller model (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.checkpoint.first_layers import check_layers
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.drafting.chain import draft_chain
from jaxinfer.decoding.drafting.loaded_model import in_fewer_bits, load_draft_model, place_draft_model
from jaxinfer.decoding.drafting.model_chain import ModelChain
from jaxinfer.decoding.drafting.model_tree import Level, check_ranks, draft_tree, num_ranks, num_run
from jaxinfer.decoding.drafting.schedules import FIRST, MOST, SCHEDULES, Lengths, Schedule, first_lengths, next_lengths
from jaxinfer.decoding.drafting.spare_devices import spare_devices
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.decoding.strategy import Prefilled, Proposal, Strategy, Target, Verified, made_anew
from jaxinfer.decoding.trees.dynamic import Growth, check_growth, read_growth
from jaxinfer.decoding.trees.static import Paths, read_tree, tree_depth
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.first_layers import FirstLayers
from jaxinfer.models.model import Model
from jaxinfer.notation import Array
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.partitioner import Partitioner

# The target as its own draft model.
_SELF = "self"
# The longest chain that is drafted ahead: it is drafted on by one more.
_MOST_AHEAD = 63


class DraftModelMemory(NamedTuple):
    """The draft model's cache, and how much it drafts next."""

    cache: LayeredCache
    lengths: Lengths


@dataclass(frozen=True)
class DraftModel(Strategy):
    """Draft a chain or a tree with any smaller model of the same vocabulary.

    ``model`` names it as `jaxinfer.load` does, ``layers`` how many of its first layers to use (0: all), and ``weights``
    its few bits. ``self`` is the target: its first ``layers`` as they are, or in fewer bits where ``weights`` say so or
    no ``layers`` are named (int4:group=32). Under ``match`` it draws with the target's own noise, so that the two agree
    wherever their distributions do; under ``rejection`` it draws with its own and p / q decides. ``schedule``
    sets a chain's length: ``constant``, ``heuristic`` (two more after full acceptance, else one less),
    ``confidence`` (up to the first draft that the drafter gave less than ``confidence``) or ``bass`` (one for the whole
    batch, led by the row that accepted most; 2404.15778). ``num_draft_tokens`` is the first length and
    ``max_draft_tokens`` the most; 0 takes the published ones. ``tree`` is a tree of ranks
    (`jaxinfer.decoding.trees.static`), or ``dynamic:N`` for the N nodes that the model finds likeliest at each step, at
    most ``num_draft_tokens`` deep (`jaxinfer.decoding.trees.dynamic`); ``paths`` and ``growth`` are such trees
    themselves. On ``devices`` of its own, so many of those that the target leaves, it drafts the next chain while the
    target verifies (`jaxinfer.decoding.ahead`); ``place`` is where.
    """

    name: ClassVar[str] = "draft_model"
    description: ClassVar[str] = "draft with a smaller model of the same vocabulary, or with the model's first layers"

    model: str = ""
    layers: int = 0
    weights: str = ""
    tree: str = ""
    num_draft_tokens: int = 0
    max_draft_tokens: int = 0
    schedule: Schedule = "constant"
    confidence: float = 0.4
    verify: Literal["match", "rejection"] = "match"
    devices: int = 0
    config: DecoderConfig | None = field(default=None, repr=False)
    backend: Backend | None = field(default=None, repr=False)
    params: Any = field(default=None, repr=False, compare=False)
    # How many tokens up to the current one it reads first. Of its own draft that was accepted whole it has not seen
    # the last token; of other drafters' none.
    catch_up: int = field(default=2, repr=False)
    paths: Paths = field(default=(), repr=False)
    growth: Growth | None = field(default=None, repr=False)
    place: Partitioner | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_choice(self, "schedule", SCHEDULES)
        check_choice(self, "verify", ("match", "rejection"))
        check_range(self, "layers", 0, 1000)
        check_range(self, "num_draft_tokens", 0, 64)
        check_range(self, "max_draft_tokens", 0, 64)
        check_range(self, "confidence", 0.0, 1.0)
        if self.max_draft_tokens and self.max_draft_tokens < self.num_draft_tokens:
            raise InvalidOption(
                f"draft_model: num_draft_tokens={self.num_draft_tokens} exceeds "
                f"max_draft_tokens={self.max_draft_tokens}"
            )
        if self.schedule in ("constant", "confidence") and 0 < self.num_draft_tokens < self.max_draft_tokens:
            raise InvalidOption(
                f"draft_model: lengths of schedule={self.schedule} never grow: leave max_draft_tokens= out"
            )
        if self.schedule != "confidence" and self.confidence != type(self).confidence:
            raise InvalidOption("draft_model: confidence= is of schedule=confidence: name that, or leave it out")
        check_range(self, "devices", 0, 65536)
        if self.tree:
            self._check_tree()
        if self.devices:
            self._check_alone()

    @property
    def acceptance(self) -> str:
        return self.verify

    @property
    def has_distinct_siblings(self) -> bool:
        return self.branches

    @property
    def parameters(self) -> Any:
        return self.params

    @property
    def first(self) -> int:
        """The first draft's length."""
        return self.num_draft_tokens or min(FIRST[self.schedule], self.max_depth)

    @property
    def shape(self) -> Paths | Growth | None:
        """The tree that it drafts, None for a chain; once it is resolved."""
        return self.growth or self.paths or None

    @property
    def branches(self) -> bool:
        return self.growth is not None or len(self.paths) > tree_depth(self.paths)

    @property
    def max_depth(self) -> int:
        if self.shape is not None:
            return tree_depth(self.paths) if self.growth is None else self.growth.max_depth
        # A constant length, and one that confidence cuts, never grow.
        if self.schedule in ("heuristic", "bass"):
            return self.max_draft_tokens or max(MOST[self.schedule], self.num_draft_tokens)
        return self.num_draft_tokens or self.max_draft_tokens or MOST[self.schedule]

    @property
    def headroom(self) -> int:
        if self.shape is not None:
            return max(self.num_nodes, num_run(self.shape))
        if self.drafts_elsewhere:
            # It drafts ahead of a chain one more, as the target adds a token to it.
            return 2 * self.max_depth + 1 + self.catch_up
        return self.max_depth + self.catch_up

    @property
    def drafts_elsewhere(self) -> bool:
        return self.devices > 0

    @property
    def num_nodes(self) -> int:
        if self.growth is not None:
            return self.growth.num_nodes
        if self.drafts_elsewhere:
            return self.max_depth + 1
        return 1 + len(self.paths) if self.paths else super().num_nodes

    def in_sum(self, max_depth: int) -> "DraftModel":
        return replace(self, catch_up=max_depth + 2)

    def resolve(self, target: Target) -> "DraftModel":
        """Load the draft model in the target's dtype; raises InvalidOption where its tokens are others."""
        shaped = self.shaped(target.config)
        if self.devices:
            place = self.place or spare_devices(target, self.devices)
            shaped, target = replace(shaped, place=place), target._replace(partitioner=place)
        if self.shares_weights:
            check_layers(target.config, self.layers, "draft_model: layers")
            return shaped
        if self.config is not None and self.backend is not None:
            at_hand = self.config, self.backend, self.params
            return replace(shaped, **place_draft_model(self.name, self.model, *at_hand, target)._asdict())
        if not self.model:
            raise InvalidOption("draft_model: name the draft model, as in draft_model:model=PATH_OR_HUB_ID")
        few_bits = parse_few_bits(self.weights or ("int4:group=32" if self.model == _SELF else None))
        if self.model == _SELF:
            # By rejection the text depends on what drafts.
            own = target if self.acceptance == "match" else target._replace(made_once=made_anew)
            return replace(shaped, **in_fewer_bits(self.name, few_bits, own, self.layers)._asdict())
        return replace(shaped, **load_draft_model(self.name, self.model, target, self.layers, few_bits)._asdict())

    @property
    def shares_weights(self) -> bool:
        """Whether it drafts with the target's first layers as they are."""
        return self.model == _SELF and self.layers > 0 and not self.weights

    def shaped(self, target: DecoderConfig) -> "DraftModel":
        """Return the strategy with the tree that its options name for a target; raises InvalidOption for none such."""
        if self.shape is None and not self.tree:
            return self
        paths, growth = self.paths, self.growth
        if self.shape is None:
            num_nodes = read_growth(self.tree)
            growth = None if num_nodes is None else Growth(num_nodes, self.num_draft_tokens or FIRST["constant"])
            paths = read_tree(self.tree) if num_nodes is None else ()
        if self.verify == "rejection":
            check_ranks(paths, f"draft_model: tree={self.tree}")
        if growth is not None:
            check_growth(growth)
        shaped = replace(self, paths=paths, growth=growth)
        assert shaped.shape is not None
        if num_ranks(shaped.shape) > target.num_tokens:
            raise InvalidOption(f"draft_model: tree={self.tree} ranks more than {target.num_tokens} tokens")
        # Of accepted nodes only those of a chain stand where its cache could keep them.
        return replace(shaped, catch_up=max(self.catch_up, shaped.max_depth + 1))

    def _check_tree(self) -> None:
        """Refuse options that a tree has no use for."""
        is_dynamic = read_growth(self.tree) is not None
        if self.schedule != "constant":
            raise InvalidOption(f"draft_model: schedule={self.schedule} sets a chain's length: leave tree= out")
        if self.max_draft_tokens or (self.num_draft_tokens and not is_dynamic):
            given = "max_draft_tokens" if self.max_draft_tokens else "num_draft_tokens"
            raise InvalidOption(f"draft_model: tree={self.tree} says how deep it is: leave {given}= out")
        if is_dynamic and self.verify == "rejection":
            raise InvalidOption(
                f"draft_model: tree={self.tree} is chosen by what was drawn, which verify=rejection cannot make up "
                "for: choose a tree of ranks, such as tree=3.2.1"
            )

    def _check_alone(self) -> None:
        """Refuse options that drafting ahead cannot follow."""
        if self.model == _SELF:
            raise InvalidOption("draft_model: model=self is where the target is: name a model, or leave devices= out")
        if self.num_draft_tokens > _MOST_AHEAD:
            raise InvalidOption(f"draft_model: num_draft_tokens must be at most {_MOST_AHEAD} with devices=")
        given = "tree" if self.tree else "max_draft_tokens" if self.max_draft_tokens else ""
        given = given or ("schedule" if self.schedule != "constant" else "verify" if self.verify != "match" else "")
        if given:
            raise InvalidOption(
                f"draft_model: {given}={getattr(self, given)} does not go with devices=, which drafts chains of one "
                f"length: leave {given}= out"
            )

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> DraftModelMemory:
        drafter = self._drafter(model, params)
        batch, num_slots = state.tokens_BS.shape
        # A tree comes in several passes, which a ring has no places for: rings are as long as texts then, and none.
        headroom = self.headroom if self.shape is None else num_slots
        if isinstance(drafter, FirstLayers):
            cache = drafter.create_cache(batch, num_slots, headroom)
        else:
            cache = create_cache(drafter.config, batch, num_slots, drafter.decoder.backend, headroom)
        tokens_BT = state.tokens_BS[:, : prefilled.num_tokens]
        # All but the current token: of a text that goes on, its output too.
        counts_B = state.lengths_B - 1
        chunk = prefill_chunk(drafter.decoder.backend, prefilled.num_tokens)
        _, cache = forward_prompt(drafter, tokens_BT, counts_B, cache, chunk, state.context_lengths_B)
        return DraftModelMemory(cache, first_lengths(batch, self.first))

    def propose(self, model: Model, params: Any, state: DecodeState, memory: DraftModelMemory) -> Proposal:
        drafter, lengths = self._drafter(model, params), memory.lengths
        start_B, asked = state.lengths_B - 1, ModelChain(drafter, state, self.catch_up)

        def level_logits(level: Level, cache: LayeredCache) -> tuple[Array, Any]:
            if level.depth == 0:
                logits_BV, cache = asked.first_logits(level.tokens_BW[:, 0], 0, cache)
                return logits_BV[:, None], cache
            positions_BW = jnp.broadcast_to(start_B[:, None] + level.depth, level.tokens_BW.shape)
            placements = cache.place(start_B, level.relation_BWA)
            hidden_BWD, cache = drafter.forward(
                level.tokens_BW, positions_BW, cache, placements, state.context_lengths_B
            )
            return drafter.logits(hidden_BWD), cache

        if self.shape is not None:
            backend, vocab_size = drafter.decoder.backend, model.config.vocab_size
            grown = draft_tree(state, level_logits, memory.cache, self.shape, self.verify, vocab_size, backend)
            memory = DraftModelMemory(grown.carry, lengths)
            passes, chances_BM = self._share(model) * self.max_depth, jnp.exp(grown.log_p_BM)
            return Proposal(grown.tree, memory, None, grown.log_q_BMV, passes, chances_BM)
        draft = draft_chain(
            state,
            asked.next_logits,
            memory.cache,
            self.max_depth,
            jnp.max(jnp.where(state.finished_B, 1, lengths.counts_B)),
            self.verify,
            model.config.vocab_size,
            confidence=self.confidence if self.schedule == "confidence" else None,
            first_logits=asked.first_logits,
        )
        counted_BM = jnp.arange(self.max_depth + 1)[None, :] <= lengths.counts_B[:, None]
        tree = chain(draft.tokens_BM, draft.drafted_BM & counted_BM)
        passes = 0.0
        if self.shares_weights:
            passes = self._share(model) * jnp.sum(draft.drafted_BM[:, 1:].any(axis=0), dtype=jnp.float32)
        return Proposal(tree, DraftModelMemory(draft.carry, lengths), None, draft.log_q_BMV, passes)

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> DraftModelMemory:
        memory: DraftModelMemory = proposal.memory
        accepted_B, running_B = walk.taken_B - 1, ~state.finished_B
        lengths = next_lengths(self.schedule, memory.lengths, accepted_B, running_B, self.max_depth)
        return DraftModelMemory(memory.cache, lengths)

    def _drafter(self, model: Model, params: Any) -> Model:
        if self.shares_weights:
            # Drafts need not have the bits of other steps.
            decoder = replace(model.decoder, backend=replace(model.decoder.backend, step_rows=1))
            return FirstLayers(decoder, model.params, model.adapters_B, self.layers)
        assert self.config is not None
        assert self.backend is not None
        return Model(Decoder(self.config, self.backend), params)

    def _share(self, model: Model) -> float:
        """Return how much of the target's blocks a pass of the drafter reads."""
        return self.layers / model.config.num_layers if self.shares_weights else 0.0
