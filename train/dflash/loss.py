"""The training of DFlash drafters on a frozen model: blocks at many places of whole texts, all in one pass.

A block begins at an anchor, a token of an answer. It sees the features of the tokens before the anchor, and itself. At
its place k = 1 .. N - 1 it predicts the token k places after the anchor. With p_k its distribution over the loss
vocabulary, the loss is the mean over all places of all blocks, with weights exp(-(k - 1) / gamma), of

    (1 - s) * -log p_k(token)  +  s * KL(teacher || p_k)

where the teacher is the model's own distribution of that token, given all tokens before it.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.dflash import DFlashConfig, Drafter
from jaxinfer.models.layers import index_in_kind
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.backend import Backend
from train.loop.step import Tally
from train.streams.forward import TextKeys
from train.streams.loss import StreamRows, look_ahead, row_logits


@dataclass(frozen=True)
class DFlashLoss:
    """The loss as a function of a drafter's parameters (`jaxinfer.models.drafters.dflash`).

    ``backend`` says how the drafter runs, ``gamma`` how fast weights fall, in places; ``soft`` is the teacher's share
    s. A batch has the anchors one place after its ``picks``, and in ``hidden`` the states of each token before the
    layers whose features are read; with a teacher also those after the last layer.
    """

    decoder: Decoder
    dflash: DFlashConfig
    backend: Backend
    gamma: float
    soft: float = 0.0

    def __call__(self, learned: Params, frozen: Params, batch: StreamRows, key: jax.Array) -> Tally:
        """Tally one batch; ``frozen`` has the model's ``"params"`` and, with a loss vocabulary, its ``"output"``."""
        frozen = jax.lax.stop_gradient(frozen)
        model = Model(self.decoder, frozen["params"])
        states_BPJD = block_states(model, Drafter(self.dflash, self.backend, learned), batch)
        num_places = self.dflash.block_size - 1
        targets = look_ahead(batch, self.dflash.block_size)
        rows_BPJ, is_valid_BPJ = (array[..., 1:] for array in (targets.rows_BPA, targets.is_valid_BPA))
        is_known_BPJ = is_valid_BPJ & (rows_BPJ >= 0)
        logits_BPJW = row_logits(model, frozen, states_BPJD)
        chosen_BPJ = jnp.take_along_axis(logits_BPJW, jnp.maximum(rows_BPJ, 0)[..., None], axis=-1)[..., 0]
        totals_BPJ = jax.nn.logsumexp(logits_BPJW, axis=-1)
        hard_BPJ = losses_BPJ = totals_BPJ - chosen_BPJ
        if self.soft:
            teacher_BPJW = self._teacher(model, frozen, batch)
            logprobs_BPJW = logits_BPJW - totals_BPJ[..., None]
            divergence_BPJ = jnp.sum(jnp.exp(teacher_BPJW) * (teacher_BPJW - logprobs_BPJW), axis=-1)
            losses_BPJ = (1 - self.soft) * hard_BPJ + self.soft * divergence_BPJ
        weights_J = jnp.exp(-jnp.arange(num_places) / self.gamma)
        weights_BPJ = jnp.where(is_known_BPJ, weights_J, 0)
        is_hit_BPJ = (chosen_BPJ >= jnp.max(logits_BPJW, axis=-1)) & is_known_BPJ
        hits_J, tries_J, hard_J, known_J = (
            jnp.sum(array, axis=(0, 1), dtype=jnp.float32)
            for array in (is_hit_BPJ, is_valid_BPJ, jnp.where(is_known_BPJ, hard_BPJ, 0), is_known_BPJ)
        )
        others = {}
        for at in range(num_places):
            others |= {f"place_{at + 1}_loss": (hard_J[at], known_J[at])}
            others |= {f"place_{at + 1}_top1": (hits_J[at], tries_J[at])}
        return Tally(jnp.sum(weights_BPJ * jnp.where(is_known_BPJ, losses_BPJ, 0)), jnp.sum(weights_BPJ), others)

    def _teacher(self, model: Model, frozen: Params, batch: StreamRows) -> Float[Array, "B P J W"]:
        """Return the model's log-probabilities of each place's token, over the loss vocabulary."""
        batch_size, num_picks = batch.picks_BP.shape
        final_BTD = jnp.asarray(batch.hidden_BTD)[..., self.dflash.features_dim :]
        # Of the token k places after an anchor it tells at the one before.
        places_BPJ = jnp.maximum(jnp.asarray(batch.picks_BP), 0)[..., None] + jnp.arange(1, self.dflash.block_size)
        flat_BX1 = places_BPJ.reshape(batch_size, -1)[..., None]
        picked_BXD = jnp.take_along_axis(final_BTD, flat_BX1, axis=1, mode="clip")
        normed_BXD = model.normed(picked_BXD.astype(self.decoder.backend.compute_dtype))
        logits = row_logits(model, frozen, normed_BXD).reshape(batch_size, num_picks, self.dflash.block_size - 1, -1)
        return jax.nn.log_softmax(logits)


def block_states(model: Model, drafter: Drafter, batch: StreamRows) -> Float[Array, "B P J D"]:
    """Return what the model's output matrix reads at places 1 .. N - 1 of the block of each pick."""
    dflash, config = drafter.dflash, drafter.dflash.decoder
    picks_BP, texts = jnp.maximum(jnp.asarray(batch.picks_BP), 0), batch.texts
    batch_size, num_tokens = texts.tokens_BT.shape
    lengths_B = jnp.full((batch_size,), num_tokens, jnp.int32)
    features_BTF = jnp.asarray(batch.hidden_BTD)[..., : dflash.features_dim].astype(drafter.backend.compute_dtype)
    # What tokens of the text would see is of no account: they have no states here.
    unseen = jnp.ones((batch_size, num_tokens, num_tokens), bool)
    placed = (Placement(texts.positions_BT, unseen),) * len(config.kinds)
    empty = _empty(drafter, batch_size, num_tokens)
    cache = drafter.write(drafter.context(features_BTF), texts.positions_BT, empty, placed, lengths_B)
    kept = LayeredCache(tuple(replace(part, is_kept=True) for part in cache.parts))  # pyright: ignore[reportArgumentType]
    anchors_BP = jnp.minimum(picks_BP + 1, num_tokens - 1)
    tokens_BP, first_BP = (
        jnp.take_along_axis(array, anchors_BP, axis=1) for array in (texts.tokens_BT, texts.positions_BT)
    )
    positions_BPN = first_BP[..., None] + jnp.arange(dflash.block_size, dtype=first_BP.dtype)
    hidden_BPND = drafter.embedded_blocks(model, tokens_BP, positions_BPN)
    relation_BRS = block_relation(texts.segments_BT, picks_BP, dflash.block_size)
    positions_BR = positions_BPN.reshape(batch_size, -1)
    placements = (Placement(positions_BR, relation_BRS),) * len(config.kinds)
    hidden_BRD = hidden_BPND.reshape(batch_size, -1, hidden_BPND.shape[-1])
    states_BRD = drafter.run(hidden_BRD, positions_BR, kept, placements, lengths_B)
    states_BPND = states_BRD.reshape(hidden_BPND.shape)
    return states_BPND[:, :, 1:].astype(model.decoder.backend.compute_dtype)


def block_relation(
    segments_BT: Int[Array, "B T"], picks_BP: Int[Array, "B P"], block_size: int
) -> Bool[Array, "B R S"]:
    """Return what the places of blocks see: their text up to their pick, and the whole of their own block."""
    (batch_size, num_tokens), num_picks = segments_BT.shape, picks_BP.shape[1]
    own_BP1 = jnp.take_along_axis(segments_BT, picks_BP, axis=1)[..., None]
    seen_BPT = (segments_BT[:, None] == own_BP1) & (jnp.arange(num_tokens) <= picks_BP[..., None])
    blocks_RR = jnp.asarray(np.kron(np.eye(num_picks, dtype=bool), np.ones((block_size, block_size), bool)))
    blocks_BRR = jnp.broadcast_to(blocks_RR, (batch_size, *blocks_RR.shape))
    return jnp.concatenate([jnp.repeat(seen_BPT, block_size, axis=1), blocks_BRR], axis=2)


def _empty(drafter: Drafter, batch_size: int, num_tokens: int) -> LayeredCache:
    """Return room for the keys and values of texts in every layer."""
    config, dtype = drafter.dflash.decoder, drafter.backend.compute_dtype
    parts = []
    for kind in range(len(config.kinds)):
        count = sum(index_in_kind(config, layer)[0] == kind for layer in range(config.num_layers))
        empty = jnp.zeros((count, batch_size, num_tokens, config.num_kv_heads * config.head_dim), dtype)
        parts.append(TextKeys(keys_LBSE=empty, values_LBSE=empty, first=0))
    return LayeredCache(tuple(parts))
