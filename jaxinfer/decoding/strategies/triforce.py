"""TriForce: a long text's own weights draft for it, twice, over smaller and smaller caches (Sun et al., 2404.11912)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache, WholeCache
from jaxinfer.cache.layouts import StreamingLayout
from jaxinfer.cache.recording import RecordingCache
from jaxinfer.cache.retrieval import RetrievalCache, create_retrieval_cache
from jaxinfer.cache.streaming import StreamingCache, streaming_part
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.drafting.chain import ChainStrategy, draft_chain
from jaxinfer.decoding.drafting.loaded_model import load_draft_model, place_draft_model
from jaxinfer.decoding.drafting.model_chain import ModelChain
from jaxinfer.decoding.drafting.speculate import future_chain, speculate
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategy import Nodes, Prefilled, Proposal, Strategy, Target, Verified
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.cache_rows import cached_width
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import causal_ancestors

_BUDGET, _WINDOW = 4096, 234
# How many tokens up to the current one a small model reads first. It has not seen the last draft that was taken, nor
# what the retrieval cache and then the full one added.
_CATCH_UP = 3


class Sizes(NamedTuple):
    """How many tokens of a text of this many slots each cache holds."""

    budget: int
    window: int
    tail: int


class Smaller(NamedTuple):
    """The smaller caches of the layers that see the whole text, in the order of kinds.

    ``age_B`` counts a row's steps since its chunks were last chosen. There is no streaming cache where none is used;
    with a drafter they are those of its own layers.
    """

    retrieval: tuple[RetrievalCache, ...]
    streaming: tuple[Any, ...]
    age_B: Any


@dataclass(frozen=True)
class StreamingDrafter(ChainStrategy):
    """Draft a chain over a streaming cache, which is its memory; the state's own cache is left alone."""

    def propose(self, model: Model, params: Any, state: DecodeState, memory: LayeredCache) -> Proposal:
        before_B = jnp.maximum(state.lengths_B - 2, 0)

        def next_logits(token_B: Int[Array, " B"], index: Int[Array, ""], carry: Any) -> tuple[Array, Any]:
            # The token before goes along: of a draft that was accepted whole, this cache has not seen the last one.
            cache, token_before_B = carry
            positions_B2 = (before_B + index)[:, None] + jnp.arange(2)
            placements = cache.place(positions_B2[:, 0], causal_ancestors(2)[None])
            tokens_B2 = jnp.stack([token_before_B, token_B], axis=1)
            hidden_B2D, cache = model.forward(tokens_B2, positions_B2, cache, placements, state.context_lengths_B)
            return model.logits(hidden_B2D[:, -1]), (cache, token_B)

        token_before_B = jnp.take_along_axis(state.tokens_BS, before_B[:, None], axis=1)[:, 0]
        count = _worthwhile(state, self.num_draft_tokens)
        draft = draft_chain(
            state,
            next_logits,
            (memory, token_before_B),
            self.num_draft_tokens,
            count,
            "match",
            model.config.vocab_size,
        )
        tree = chain(draft.tokens_BM, draft.drafted_BM)
        return Proposal(tree, draft.carry[0], passes=count.astype(jnp.float32))


@dataclass(frozen=True)
class SmallModelDrafter(ChainStrategy):
    """Draft a chain with a small model on a streaming cache of its own, which is its memory."""

    config: DecoderConfig | None = None
    backend: Backend | None = None

    def model(self, params: Any) -> Model:
        """Return the small model."""
        assert self.config is not None
        assert self.backend is not None
        return Model(Decoder(self.config, self.backend), params)

    def propose(self, model: Model, params: Any, state: DecodeState, memory: LayeredCache) -> Proposal:
        asked = ModelChain(self.model(params), state, _CATCH_UP)
        count, vocab_size = _worthwhile(state, self.num_draft_tokens), model.config.vocab_size
        chained = state, asked.next_logits, memory, self.num_draft_tokens, count, "match", vocab_size
        draft = draft_chain(*chained, first_logits=asked.first_logits)
        drafted_BM = draft.drafted_BM & (jnp.arange(self.num_draft_tokens + 1) <= count)
        return Proposal(chain(draft.tokens_BM, drafted_BM), draft.carry)


@dataclass(frozen=True)
class TriForce(Strategy):
    """Let the model on a retrieval cache decode ahead, itself fed by drafts of the model on a streaming cache.

    The inner speculation takes the drafts that match what the retrieval cache draws, so that its law is that of the
    retrieval cache alone. (The published code draws anew from it after a rejection, without the residual, which is
    neither.) All weights are the target's, and every pass over them counts: this pays where reading the cache costs
    more than reading the weights. With a ``drafter``, named as `jaxinfer.load` does, that model drafts at the lowest
    level, on a streaming cache of its own, as published: two models, three caches.

    ``num_draft_tokens`` go to the full cache at a time, ``num_inner_tokens`` to the retrieval cache (0 leaves the
    streaming cache out). The retrieval cache holds ``budget`` tokens in chunks of ``chunk``, chosen anew every
    ``renew_steps`` steps, and the last ``window`` at least; the streaming cache ``sinks`` and ``window``. A budget or
    window of 0 is 4096 or 234, and at most a quarter or an eighth of the cache.
    """

    name: ClassVar[str] = "triforce"
    description: ClassVar[str] = "decode ahead on chunks of a long text that are retrieved by the model's own queries"
    needs_dense_cache: ClassVar[bool] = True

    num_draft_tokens: int = 6
    num_inner_tokens: int = 1
    budget: int = 0
    chunk: int = 8
    sinks: int = 16
    window: int = 0
    renew_steps: int = 16
    drafter: str = ""
    config: DecoderConfig | None = field(default=None, repr=False)
    backend: Backend | None = field(default=None, repr=False)
    params: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_range(self, "num_draft_tokens", 1, 64)
        check_range(self, "num_inner_tokens", 0, 64)
        check_range(self, "budget", 0, 2**30)
        check_range(self, "chunk", 1, 1024)
        check_range(self, "sinks", 0, 1024)
        check_range(self, "window", 0, 2**30)
        check_range(self, "renew_steps", 1, 2**20)
        if self.budget % self.chunk:
            raise InvalidOption(f"triforce: budget={self.budget} is no multiple of chunk={self.chunk}")
        if self.drafter and not self.num_inner_tokens:
            raise InvalidOption("triforce: drafter= drafts num_inner_tokens at a time: choose 1 or more of them")
        if self.drafter == "self":
            raise InvalidOption("triforce: the model drafts for itself already: name a smaller one, or no drafter=")

    @property
    def parameters(self) -> Any:
        return () if self.params is None else self.params

    @property
    def headroom(self) -> int:
        return self.num_draft_tokens + self.num_inner_tokens + 2

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    def resolve(self, target: Target) -> "TriForce":
        if all(kind.window is not None for kind in target.config.kinds):
            raise InvalidOption("triforce: every layer of this model has a window: there is nothing to retrieve from")
        if self.config is not None and self.backend is not None:
            at_hand = self.config, self.backend, self.params
            return replace(self, **place_draft_model(self.name, self.drafter, *at_hand, target)._asdict())
        if self.drafter:
            return replace(self, **load_draft_model(self.name, self.drafter, target)._asdict())
        return self

    def check_slots(self, num_slots: int) -> None:
        sizes = self.sizes(num_slots)
        for option, held in (("budget", sizes.budget), ("window", sizes.window), ("sinks", self.sinks)):
            if held > num_slots:
                raise InvalidOption(f"triforce: {option}={held} is larger than the cache of {num_slots} tokens")

    def sizes(self, num_slots: int) -> Sizes:
        """Return the caches' sizes for texts of up to ``num_slots`` tokens."""
        budget = self.budget or max(min(_BUDGET, num_slots // 4) // self.chunk, 1) * self.chunk
        window = self.window or max(min(_WINDOW, num_slots // 8), 1)
        grown = self.renew_steps * (self.num_draft_tokens + 1) + self.headroom
        return Sizes(budget, window, min(window + self.chunk + grown, num_slots))

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Smaller:
        # Until the first verification has asked for something, the first chunks stand in.
        config, backend, full = model.config, model.decoder.backend, self._full_parts(model, state)
        shape = state.lengths_B.shape[0], config.num_heads, cached_width(config, backend)
        dtype = jnp.dtype(backend.compute_dtype)
        sizes, held_B = self.sizes(state.tokens_BS.shape[1]), jnp.maximum(state.lengths_B - 1, 0)
        retrieval, streaming = [], []
        for part in full:
            queries_LBNH = jnp.zeros((part.keys.shape[0], *shape), dtype)
            empty = create_retrieval_cache(part, sizes.budget, sizes.tail)
            asked = (queries_LBNH, held_B, self.chunk, sizes.window, backend)
            retrieval.append(empty.rechosen(part, *asked, num_kv_heads=config.num_kv_heads))
            if self.num_inner_tokens and self.config is None:
                streaming.append(streaming_part(part, held_B, self.sinks, sizes.window, self.headroom))
        if self.config is not None:
            streaming = self._read_by_drafter(params, state, prefilled.num_tokens).parts
        return Smaller(tuple(retrieval), tuple(streaming), jnp.full_like(held_B, self.renew_steps))

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Smaller) -> Proposal:
        cache = self._with_full_parts(model, state.cache, memory.retrieval)
        if self.config is not None:
            drafter = SmallModelDrafter(self.num_inner_tokens, self.config, self.backend)
            inner = LayeredCache(memory.streaming)
        elif self.num_inner_tokens:
            drafter = StreamingDrafter(self.num_inner_tokens)
            inner = self._with_full_parts(model, state.cache, memory.streaming)
        else:
            drafter, inner = Autoregressive(), LayeredCache(())
        future, inner = speculate(model, drafter, inner, params, state, cache, self.num_draft_tokens)
        # The caches are handed on as drafting left them: to keep those from before would be to copy them.
        retrieval = tuple(part for part in future.cache.parts if isinstance(part, RetrievalCache))
        streaming = inner.parts
        if self.config is None:
            streaming = tuple(part for part in inner.parts if isinstance(part, StreamingCache))
        tree = future_chain(state, future, self.num_draft_tokens)
        return Proposal(tree, Smaller(retrieval, streaming, memory.age_B), passes=future.passes_B)

    def forward(self, model: Model, params: Any, state: DecodeState, proposal: Proposal, nodes: Nodes) -> Verified:
        """Run the target over the chain, and return its queries as well."""
        config, backend = model.config, model.decoder.backend
        dtype = jnp.dtype(backend.compute_dtype)
        shape = *nodes.positions_BM.shape, config.num_heads, cached_width(config, backend)
        full = self._full_parts(model, state)
        recording = [RecordingCache(part, jnp.zeros((part.keys.shape[0], *shape), dtype)) for part in full]
        cache = self._with_full_parts(model, state.cache, recording)
        verified = super().forward(model, params, state._replace(cache=cache), proposal, nodes)
        recorded = [part for part in verified.cache.parts if isinstance(part, RecordingCache)]
        cache = self._with_full_parts(model, verified.cache, [part.cache for part in recorded])
        return verified._replace(cache=cache, aux=[jnp.moveaxis(part.queries_LBTNH, 0, 2) for part in recorded])

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Smaller:
        memory: Smaller = proposal.memory
        backend = model.decoder.backend
        full = self._full_parts(model, state)
        # What a step has committed, and the token before, which the drafter writes too.
        first_B1 = jnp.maximum(state.lengths_B - self.num_draft_tokens - 3, 0)[:, None]
        positions_BM = first_B1 + jnp.arange(self.num_draft_tokens + 2)
        streaming = memory.streaming
        if self.config is None:
            streaming = tuple(part.refreshed(source, positions_BM) for part, source in zip(streaming, full))
        held_B, age_B = jnp.maximum(state.lengths_B - 1, 0), memory.age_B + 1
        # Of all rows at once, as soon as one that runs is due.
        is_due = ((age_B >= self.renew_steps) & ~state.finished_B).any()
        window = self.sizes(state.tokens_BS.shape[1]).window
        retrieval = []
        for part, source, asked_BLNH in zip(memory.retrieval, full, verified.last.aux, strict=True):
            part = part.refreshed(source, positions_BM)
            asked = (asked_BLNH.swapaxes(0, 1), held_B, self.chunk, window, backend, is_due)
            retrieval.append(part.rechosen(source, *asked, num_kv_heads=model.config.num_kv_heads))
        return Smaller(tuple(retrieval), streaming, jnp.where(is_due, 0, age_B))

    def _read_by_drafter(self, params: Any, state: DecodeState, num_tokens: int) -> LayeredCache:
        """Return the drafter's streaming cache with the prompts."""
        assert self.config is not None
        assert self.backend is not None
        small = SmallModelDrafter(self.num_inner_tokens, self.config, self.backend).model(params)
        batch, num_slots = state.tokens_BS.shape
        # It goes back to before a step's first token from the last that a step may reach.
        headroom = self.headroom + _CATCH_UP
        layout = StreamingLayout(self.sinks, max(self.sizes(num_slots).window, headroom))
        cache = create_cache(self.config, batch, num_slots, self.backend, headroom, layout)
        asked = state.lengths_B - 1, cache, prefill_chunk(self.backend, num_tokens), state.context_lengths_B
        return forward_prompt(small, state.tokens_BS[:, :num_tokens], *asked)[1]

    def _full_parts(self, model: Model, state: DecodeState) -> list[WholeCache]:
        parts = zip(state.cache.parts, model.config.kinds, strict=True)
        return [part for part, kind in parts if kind.window is None and isinstance(part, WholeCache)]

    def _with_full_parts(self, model: Model, cache: LayeredCache, parts: Any) -> LayeredCache:
        """Return a cache with other parts for the layers that see the whole text."""
        replaced = iter(parts)
        kinds = model.config.kinds
        return LayeredCache(
            tuple(next(replaced) if kind.window is None else part for part, kind in zip(cache.parts, kinds))
        )


def _worthwhile(state: DecodeState, most: int) -> Int[Array, ""]:
    """Return how many drafts a text that goes on has room for: of the row that has furthest to go."""
    # The verifier adds a token, so that row needs one draft less than that.
    furthest = jnp.max(jnp.where(state.finished_B, 0, state.limits_B - state.lengths_B))
    return jnp.clip(furthest - 1, 0, most)
