"""The loss of an EAGLE-3 drafter: cross-entropy with the target's own distribution, step by step on its own outputs.

With q_i the drafter's distribution in step i (`train.eagle.unroll`) and p the target's of the same token given the
text, both over the draft vocabulary, the loss of a row is ``sum_i 0.8^i sum_t -p . log q_i``. It is over the tokens of
answers for which the target finds a token of that vocabulary likeliest (2503.01840).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.eagle import EagleShape, draft_logits
from jaxinfer.models.model import Model
from jaxinfer.notation import Params
from train.eagle.rows import EagleRows
from train.eagle.unroll import ahead, is_asked, read_features, unroll
from train.loop.position_pieces import loss_by_pieces
from train.loop.step import Tally


@dataclass(frozen=True)
class EagleLoss:
    """The loss as a function of a drafter; ``decay`` to the i-th power weighs step i."""

    decoder: Decoder
    shape: EagleShape
    steps: int = 5
    decay: float = 0.8

    def __call__(self, params: Params, frozen: Params, batch: EagleRows, key: Any = None) -> Tally:
        """Tally one batch; ``frozen`` has the model's ``"params"`` and what of the drafter is not trained.

        It counts the tokens that the first step predicts.
        """
        frozen = jax.lax.stop_gradient(frozen)
        model = Model(self.decoder, frozen["params"])
        features = jax.lax.stop_gradient(read_features(self.shape, model, batch))
        drafter = {**params, **frozen["drafter"]}
        outputs = unroll(self.shape, model, drafter, features.read_BTF, batch, self.steps)
        # By the place whose target distribution a step is to find, the places that are asked for first: it is computed
        # once for all steps, and never for the tokens of prompts.
        asked = [ahead(is_asked(batch, step), -step - 1) for step in range(self.steps)]
        order_BT = jnp.argsort(~asked[0], axis=1, stable=True)

        def ordered(array: Any) -> Any:
            return jnp.take_along_axis(array, order_BT.reshape(*order_BT.shape, *[1] * (array.ndim - 2)), axis=1)

        states = tuple(ordered(ahead(hidden_BTD, -step - 1)) for step, hidden_BTD in enumerate(outputs))
        along = ordered(features.final_BTD), tuple(map(ordered, asked))
        learned = {name: params[name] for name in ("final_norm", "output") if name in params}
        count = jnp.max(jnp.sum(asked[0], axis=1, dtype=jnp.int32))
        at_once = self._at_once(*order_BT.shape)
        total, others = loss_by_pieces(self._piece, learned, states, frozen, along, count, at_once)
        return Tally(total, jnp.sum(asked[0], dtype=jnp.float32), others)

    def _at_once(self, batch: int, num_tokens: int) -> int:
        """Return of how many places logits are held: those of few stay in a CPU's caches; all on a mesh."""
        backend = self.decoder.backend
        if backend.mesh is not None:
            return batch * num_tokens
        return 256 if backend.platform == "cpu" else 1024

    def _piece(self, learned: Params, states: tuple[Any, ...], frozen: Params, along: Any) -> tuple[Any, Any]:
        """Return the loss of some places, and the figures of each step."""
        final_BTD, asked = along
        model, drafter = Model(self.decoder, frozen["params"]), {**learned, **frozen["drafter"]}
        teacher_BTV = model.logits(final_BTD).astype(jnp.float32)
        ids = drafter.get("ids")
        teacher_BTU = teacher_BTV if ids is None else teacher_BTV[..., ids]
        most_BT = jnp.max(teacher_BTU, axis=-1)
        # Ties aside, that is: its likeliest token is one of the draft vocabulary.
        is_known_BT = most_BT >= jnp.max(teacher_BTV, axis=-1)
        is_best_BTU, p_BTU = teacher_BTU >= most_BT[..., None], jax.nn.softmax(teacher_BTU)
        total, others = jnp.float32(0), {}
        for step, (hidden_BTD, asked_BT) in enumerate(zip(states, asked)):
            valid_BT = asked_BT & is_known_BT
            logits_BTU = draft_logits(self.shape, model, drafter, hidden_BTD).astype(jnp.float32)
            # -p . log q, as p adds up to one.
            losses_BT = jax.nn.logsumexp(logits_BTU, axis=-1) - jnp.sum(p_BTU * logits_BTU, axis=-1)
            loss = jnp.sum(jnp.where(valid_BT, losses_BT, 0))
            total += self.decay**step * loss
            of_best_BT = jnp.max(jnp.where(is_best_BTU, logits_BTU, -jnp.inf), axis=-1)
            hits_BT = valid_BT & (of_best_BT >= jnp.max(logits_BTU, axis=-1))
            others[f"step_{step}_loss"] = (loss, jnp.sum(valid_BT, dtype=jnp.float32))
            num_asked = jnp.sum(asked_BT, dtype=jnp.float32)
            others[f"step_{step}_top1"] = (jnp.sum(hits_BT, dtype=jnp.float32), num_asked)
        return total, others
