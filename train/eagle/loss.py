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
        teacher_BTV = jax.lax.stop_gradient(model.logits(features.final_BTD)).astype(jnp.float32)
        ids = drafter.get("ids")
        teacher_BTU = teacher_BTV if ids is None else teacher_BTV[..., ids]
        is_known_BT = jnp.max(teacher_BTU, axis=-1) >= jnp.max(teacher_BTV, axis=-1)
        # Ties aside, that is: its likeliest token is one of the draft vocabulary.
        best_BT, p_BTU = jnp.argmax(teacher_BTU, axis=-1), jax.nn.softmax(teacher_BTU)
        total = count = jnp.float32(0)
        others = {}
        for step, hidden_BTD in enumerate(unroll(self.shape, model, drafter, features.read_BTF, batch, self.steps)):
            asked_BT = is_asked(batch, step)
            valid_BT = asked_BT & ahead(is_known_BT, step + 1)
            log_q_BTU = jax.nn.log_softmax(draft_logits(self.shape, model, drafter, hidden_BTD).astype(jnp.float32))
            losses_BT = -jnp.sum(ahead(p_BTU, step + 1) * log_q_BTU, axis=-1)
            loss = jnp.sum(jnp.where(valid_BT, losses_BT, 0))
            total += self.decay**step * loss
            num_asked = jnp.sum(asked_BT, dtype=jnp.float32)
            count = num_asked if step == 0 else count
            hits_BT = valid_BT & (jnp.argmax(log_q_BTU, axis=-1) == ahead(best_BT, step + 1))
            others[f"step_{step}_loss"] = (loss, jnp.sum(valid_BT, dtype=jnp.float32))
            others[f"step_{step}_top1"] = (jnp.sum(hits_BT, dtype=jnp.float32), num_asked)
        return Tally(total, count, others)
