"""The loss of LayerSkip: every exit's cross-entropy, while layers are dropped for some of the texts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.layer_range import apply_block
from jaxinfer.models.model import Model
from jaxinfer.models.step import build_step
from jaxinfer.notation import Array, Float, Params
from train.loop.position_pieces import sum_by_pieces
from train.loop.step import Tally
from train.loop.whole_text import Predicted, place_text, predicted
from train.texts.batches import Batch


class ExitBatch(NamedTuple):
    """Rows of texts, with each row's probability to skip each layer, and the weight of each layer's exit."""

    texts: Batch
    rates_BL: Any
    weights_BL: Any


@dataclass(frozen=True)
class ExitLoss:
    """The loss as a function of the trained parameters; ``assemble`` joins these and the frozen ones."""

    decoder: Decoder
    assemble: Callable[[Any, Any], Params] = lambda trained, frozen: trained

    def __call__(self, trained: Any, frozen: Any, batch: ExitBatch, key: jax.Array) -> Tally:
        """Tally one batch; also record the loss of the whole model."""
        model, next_ones = Model(self.decoder, self.assemble(trained, frozen)), predicted(batch.texts)
        kept_LB = jax.random.uniform(key, batch.rates_BL.T.shape) >= batch.rates_BL.T

        def visit(hidden_BTD: Array, weights_B: Any) -> Any:
            def learn(hidden_BTD: Array) -> Any:
                losses_B = exit_losses(model, hidden_BTD, next_ones)
                return jnp.sum(weights_B * losses_B), jnp.sum(losses_B)

            def rest(hidden_BTD: Array) -> Any:
                return jnp.float32(0), jnp.float32(0)

            return jax.lax.cond(jnp.any(weights_B > 0), learn, rest, hidden_BTD)

        weighted_L, plain_L = visit_layers(model, batch.texts, visit, jnp.asarray(batch.weights_BL).T, kept_LB)
        count = jnp.sum(next_ones.counts_BT, dtype=jnp.float32)
        return Tally(jnp.sum(weighted_L), count, {"whole_model_loss": (plain_L[-1], count)})


def exit_losses(model: Model, hidden_BTD: Float[Array, "B T D"], next_ones: Predicted) -> Float[Array, " B"]:
    """Return each row's sum of cross-entropies if a layer's states go directly to the norm and the output matrix."""

    def losses(hidden_BTD: Array, targets_BT: Array, counts_BT: Array) -> Array:
        logits_BTV = model.logits(model.normed(hidden_BTD)).astype(jnp.float32)
        losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
        return jnp.sum(jnp.where(counts_BT, losses_BT, 0), axis=1)

    return sum_by_pieces(losses, hidden_BTD, *next_ones)


def visit_layers(
    model: Model, texts: Batch, visit: Callable[[Any, Any], Any], inputs_L: Any, kept_LB: Any = None
) -> Any:
    """Return ``visit(hidden_BTD, inputs)`` of each layer's states, stacked; rows that are not kept skip the layer.

    One scan over the layers keeps only the result of ``visit`` for each layer.
    """
    config, backend, tokens_BT = model.config, model.decoder.backend, jnp.asarray(texts.tokens_BT)
    check_layers(config, backend.scan_layers)
    text = place_text(config, tokens_BT, texts.segments_BT)
    step = build_step(config, backend, text.positions_BT, text.placements, text.lengths_B)

    def run(params: Params, hidden_BTD: Array, index: Any) -> Array:
        (hidden_BTD, _) = apply_block(config, backend, 0, params, (hidden_BTD, text.cache), index, step)
        return hidden_BTD

    if backend.remat_layers:
        run = jax.checkpoint(run, prevent_cse=False)

    def advance(hidden_BTD: Array, layer: Any) -> tuple[Array, Any]:
        params, index, inputs, kept_B = layer
        after_BTD = run(params, hidden_BTD, index)
        if kept_B is not None:
            after_BTD = jnp.where(kept_B[:, None, None], after_BTD, hidden_BTD)
        return after_BTD, visit(after_BTD, inputs)

    layers = (model.params["blocks"], jnp.arange(config.num_layers), inputs_L, kept_LB)
    _, results = jax.lax.scan(advance, model.embedded(tokens_BT, text.positions_BT), layers)
    return results


def check_layers(config: DecoderConfig, scan_layers: bool = True) -> None:
    """Raise an error for models whose layers are not one stack."""
    if config.num_layers == 1:
        raise InvalidOption("a model of one layer has no exit before its last layer: use a model with more layers")
    if len(set(config.bodies)) > 1 or not scan_layers:
        raise InvalidOption(f"layers of several kinds ({config.family}) cannot be trained with early exits")
