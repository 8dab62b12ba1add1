"""MTP: the layer that a checkpoint has for predicting further tokens drafts for it (DeepSeek-V3, 2412.19437)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.checkpoint.mtp_layer import read_mtp
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.decoding.drafting.chain import draft_chain
from jaxinfer.decoding.options import check_choice, check_range
from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.decoding.strategy import Prefilled, Proposal, Strategy, Target
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.drafters.mtp import MIMO_FORM, MtpForm, MtpLayer, mtp_config
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.masks import causal_ancestors


@dataclass(frozen=True)
class Mtp(Strategy):
    """Draft a chain with the layer that was trained, and published, with the model to predict one token further.

    ``heads`` is a folder that has it, by default the model's own. It has a cache of its own, built from the model's
    last hidden states. After the first of ``num_draft_tokens`` it goes on from its own output, as in vLLM. Under
    ``match`` it draws with the target's noise, under ``rejection`` with its own. ``params`` of a ``form`` are such a
    layer itself.
    """

    name: ClassVar[str] = "mtp"
    description: ClassVar[str] = "draft with the checkpoint's own layer for further tokens (GLM-4.5, DeepSeek-V3, MiMo)"

    heads: str = ""
    num_draft_tokens: int = 1
    verify: Literal["match", "rejection"] = "match"
    form: MtpForm = field(default=MIMO_FORM, repr=False)
    params: Params | None = field(default=None, compare=False, repr=False)
    # The layer whose input is read: the one after the last.
    layer: int = field(default=0, repr=False)
    # How many pairs of hidden state and next token it reads first: what a step accepted, and the current token's.
    catch_up: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        check_range(self, "num_draft_tokens", 1, 32)
        check_choice(self, "verify", ("match", "rejection"))

    @property
    def acceptance(self) -> str:
        return self.verify

    @property
    def parameters(self) -> Any:
        return () if self.params is None else self.params

    @property
    def features(self) -> tuple[int, ...]:
        return (self.layer,) if self.layer else ()

    @property
    def branches(self) -> bool:
        return False

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    @property
    def headroom(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def num_pairs(self) -> int:
        """How many pairs of hidden state and next token a step begins with."""
        return max(self.catch_up, self.num_draft_tokens + 1)

    def in_sum(self, max_depth: int) -> "Mtp":
        return replace(self, catch_up=max_depth + 1)

    def resolve(self, target: Target) -> "Mtp":
        """Read the layer; raises InvalidOption where there is none, or where it cannot run."""
        form, params = self.form, self.params
        if params is None:
            checkpoint = open_checkpoint(self.heads) if self.heads else target.checkpoint
            if checkpoint is None:
                raise InvalidOption("mtp: this model is of no checkpoint: name one, as in mtp:heads=FOLDER")
            form, params = read_mtp(checkpoint, target.config, target.backend)
        return replace(self, form=form, params=_placed(target, params), layer=target.config.num_layers)

    def start(self, model: Model, params: Params, state: DecodeState, prefilled: Prefilled) -> LayeredCache:
        layer = MtpLayer(model, params, self.form)
        batch, num_slots = state.tokens_BS.shape
        # A step goes back by the pairs that it reads again.
        headroom = self.headroom + self.num_pairs
        cache = create_cache(layer.config, batch, num_slots, layer.backend, headroom)
        next_BT = jnp.pad(state.tokens_BS, ((0, 0), (0, 1)))[:, 1 : prefilled.num_tokens + 1]
        reader = _FeatureReader.of(layer, state, self.layer)
        chunk = prefill_chunk(layer.backend, prefilled.num_tokens)
        _, cache = forward_prompt(reader, next_BT, state.lengths_B - 1, cache, chunk, state.context_lengths_B)
        return cache

    def propose(self, model: Model, params: Params, state: DecodeState, memory: LayeredCache) -> Proposal:
        layer = MtpLayer(model, params, self.form)
        # The last token whose hidden state is known.
        last_B = jnp.maximum(state.lengths_B - 2, 0)

        def first_logits(token_B: Int[Array, " B"], index: Any, carry: Any) -> tuple[Array, Any]:
            # Of a short text there are fewer: what comes after the last is written over.
            first_B = jnp.maximum(last_B - self.num_pairs + 1, 0)
            slots_BT = first_B[:, None] + jnp.arange(self.num_pairs, dtype=first_B.dtype)
            next_BT = jnp.take_along_axis(state.tokens_BS, slots_BT + 1, axis=1, mode="clip")
            placements = carry[0].place(first_B, causal_ancestors(self.num_pairs)[None])
            reader = _FeatureReader.of(layer, state, self.layer)
            out_BTD, cache = reader.forward(next_BT, slots_BT, carry[0], placements, state.context_lengths_B)
            out_BD = jnp.take_along_axis(out_BTD, (last_B - first_B)[:, None, None], axis=1)[:, 0]
            return layer.logits(out_BD), (cache, out_BD)

        def next_logits(token_B: Int[Array, " B"], index: Int[Array, ""], carry: Any) -> tuple[Array, Any]:
            cache, hidden_BD = carry
            place_B = last_B + index
            placements = cache.place(place_B, causal_ancestors(1)[None])
            inputs = hidden_BD[:, None], token_B[:, None], place_B[:, None]
            out_B1D, cache = layer.run(*inputs, cache, placements, state.context_lengths_B)
            return layer.logits(out_B1D[:, 0]), (cache, out_B1D[:, 0])

        hidden_BD = jnp.zeros((last_B.shape[0], model.config.model_dim), jnp.dtype(layer.backend.compute_dtype))
        count, vocab_size = self.num_draft_tokens, model.config.vocab_size
        carry = memory, hidden_BD
        draft = draft_chain(state, next_logits, carry, count, count, self.verify, vocab_size, first_logits=first_logits)
        tree = chain(draft.tokens_BM, draft.drafted_BM)
        return Proposal(tree, draft.carry[0], log_q_BMV=draft.log_q_BMV)


def _placed(target: Target, params: Params) -> Params:
    """Split a layer's block over the target's mesh as the target's are; every device has the rest of it."""
    blocks = {"blocks": {"layer_0": params["block"]}}
    own = replace(target.backend, scan_layers=False)
    placed = target.partitioner.place_params(mtp_config(target.config), own, blocks)
    rest = {name: value for name, value in params.items() if name != "block"}
    return {**target.partitioner.place(rest), "block": placed["blocks"]["layer_0"]}


@dataclass(frozen=True)
class _FeatureReader(Model):
    """An MTP layer as a model over the tokens after those whose hidden states it finds in the cache."""

    layer: Any = None
    state: Any = None
    feature: int = 0

    @classmethod
    def of(cls, layer: MtpLayer, state: DecodeState, feature: int) -> "_FeatureReader":
        """Return a layer beside a state that has its features."""
        return cls(Decoder(layer.config, layer.backend), layer.params, layer=layer, state=state, feature=feature)

    def forward(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: LayeredCache,
        placements: tuple[Placement, ...],
        context_lengths_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], LayeredCache]:
        # The final norm has not seen features yet.
        hidden_BTD = self.layer.model.normed(self.state.cache.features.read(positions_BT, (self.feature,)))
        return self.layer.run(hidden_BTD, tokens_BT, positions_BT, cache, placements, context_lengths_B)
