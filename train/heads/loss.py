"""The training of heads on a frozen model: windows of its hidden states, and their loss.

Head k reads the state at token i and, if it is conditioned, the embeddings of tokens i + 1 .. i + 1 + k. It predicts
token i + 2 + k. With p_k its distribution over the draft vocabulary, the loss of a window is

    sum_k 0.8^k sum_i  (1 - s) * -log p_k(token)  +  s * KL(teacher || p_k)

over the tokens in the draft vocabulary. The teacher is the model's own distribution of the same token, given all tokens
before it, over that vocabulary; ``s`` is 0 for plain Medusa (Cai et al., 2401.10774).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.heads import head_logits, head_states, is_conditioned
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int, Params
from train.features.hidden_states import HiddenStates
from train.loop.step import Tally

NOT_PREDICTED = -2


class Windows(NamedTuple):
    """B windows of T states, with the A further tokens and states that the heads predict.

    ``targets`` are rows of the output matrix, -1 for tokens without one, `NOT_PREDICTED` for tokens outside answers.
    ``texts`` numbers the texts; -1 is no text.
    """

    hidden_BTD: Any
    tokens_BT: Any
    positions_BT: Any
    texts_BT: Any
    targets_BT: Any


@dataclass(frozen=True)
class HeadLoss:
    """The loss as a function of heads (`jaxinfer.models.drafters.heads`).

    ``decay`` to the k-th power weighs head k. ``soft`` is the teacher's share s. ``dropout`` is the share of the heads'
    inputs that are randomly set to zero.
    """

    decoder: Decoder
    decay: float = 0.8
    soft: float = 0.0
    dropout: float = 0.0

    def __call__(self, heads: Params, frozen: Params, batch: Windows, key: jax.Array) -> Tally:
        """Tally one batch; ``frozen`` has the model's ``"params"`` and, in ``"heads"``, the heads' shared ``"output"``.

        It counts the tokens that the first head predicts.
        """
        frozen = jax.lax.stop_gradient(frozen)
        model, head_params = Model(self.decoder, frozen["params"]), {**heads, **frozen.get("heads", {})}
        num_heads, num_tokens = len(heads["heads"]), batch.tokens_BT.shape[1] - len(heads["heads"]) - 1
        views = look_ahead(model, head_params, batch, num_tokens)
        teacher = self._teacher(model, head_params, batch) if self.soft else None
        total = count = jnp.float32(0)
        others = {}
        for index in range(num_heads):
            inputs, path = self._drop(views.hidden_BTD, views.path(index, is_conditioned(head_params)), key, index)
            states = head_states(heads["heads"][index], inputs, path, self.decoder.backend)
            logprobs_BTW = jax.nn.log_softmax(head_logits(model, head_params, index, states).astype(jnp.float32))
            target_BT, valid_BT = views.targets[index], views.valid[index]
            known_BT = valid_BT & (target_BT >= 0)
            losses_BT = -jnp.take_along_axis(logprobs_BTW, jnp.maximum(target_BT, 0)[..., None], axis=-1)[..., 0]
            hard = jnp.sum(jnp.where(known_BT, losses_BT, 0))
            loss = hard
            if teacher is not None:
                ahead = slice(index + 1, index + 1 + num_tokens)
                divergence_BT = jnp.sum(jnp.exp(teacher[:, ahead]) * (teacher[:, ahead] - logprobs_BTW), axis=-1)
                loss = (1 - self.soft) * hard + self.soft * jnp.sum(jnp.where(known_BT, divergence_BT, 0))
            total += self.decay**index * loss
            if index == 0:
                count = jnp.sum(valid_BT, dtype=jnp.float32)
            hits_BT = jnp.argmax(logprobs_BTW, axis=-1) == target_BT
            valid = jnp.sum(valid_BT, dtype=jnp.float32)
            others[f"head_{index}_loss"] = (hard, jnp.sum(known_BT, dtype=jnp.float32))
            others[f"head_{index}_top1"] = (jnp.sum(hits_BT & valid_BT, dtype=jnp.float32), valid)
        return Tally(total, count, others)

    def _teacher(self, model: Model, head_params: Params, batch: Windows) -> Float[Array, "B A W"]:
        """Return the model's own log-probabilities after each state, over the draft vocabulary."""
        output = {"output": head_params["output"]} if "output" in head_params else {}
        # In joint training, the model must not become easier to predict.
        hidden_BTD = jax.lax.stop_gradient(jnp.asarray(batch.hidden_BTD).astype(jnp.float32))
        logits = head_logits(model, {"heads": [{}], **output}, 0, hidden_BTD)
        cap = model.config.final_softcap
        if output and cap is not None:
            logits = cap * jnp.tanh(logits / cap)
        return jax.nn.log_softmax(logits.astype(jnp.float32))

    def _drop(self, hidden: Array, path: Array | None, key: jax.Array, index: int) -> tuple[Array, Array | None]:
        if not self.dropout:
            return hidden, path
        keys = jax.random.split(jax.random.fold_in(key, index))
        kept = [
            None
            if array is None
            else jnp.where(jax.random.bernoulli(one, 1 - self.dropout, array.shape), array / (1 - self.dropout), 0)
            for one, array in zip(keys, (hidden, path))
        ]
        assert kept[0] is not None
        return kept[0], kept[1]


class Views(NamedTuple):
    """The inputs and targets of each head, for T states per window."""

    hidden_BTD: Float[Array, "B T D"]
    embedded_BAD: Float[Array, "B A D"]
    targets: Sequence[Int[Array, "B T"]]
    valid: Sequence[Bool[Array, "B T"]]

    def path(self, index: int, conditioned: bool) -> Float[Array, "B T d_path"] | None:
        """Return the embeddings along the path to head ``index``, None for heads that do not read them."""
        if not conditioned:
            return None
        count = self.hidden_BTD.shape[1]
        return jnp.concatenate([self.embedded_BAD[:, 1 + at : 1 + at + count] for at in range(index + 1)], axis=-1)


def look_ahead(model: Model, head_params: Params, batch: Windows, num_tokens: int) -> Views:
    """Shift a batch for each head; a target in another text than its state is not valid."""
    num_heads = len(head_params["heads"])
    dtype = jnp.dtype(model.decoder.backend.compute_dtype)
    embedded_BAD = model.embedded(jnp.asarray(batch.tokens_BT), jnp.asarray(batch.positions_BT))
    targets, valid = [], []
    for index in range(num_heads):
        ahead = slice(index + 2, index + 2 + num_tokens)
        targets.append(jnp.asarray(batch.targets_BT)[:, ahead])
        texts_BT = jnp.asarray(batch.texts_BT)
        is_same_BT = (texts_BT[:, ahead] == texts_BT[:, :num_tokens]) & (texts_BT[:, ahead] >= 0)
        valid.append(is_same_BT & (targets[-1] != NOT_PREDICTED))
    hidden_BTD = jnp.asarray(batch.hidden_BTD)[:, :num_tokens].astype(dtype)
    return Views(hidden_BTD, embedded_BAD, targets, valid)


class WindowSource:
    """Cuts hidden states into windows of ``length`` that overlap only by the heads' look-ahead."""

    def __init__(self, states: HiddenStates, length: int, num_heads: int, target_rows_V: np.ndarray) -> None:
        self._states, self._length, self._ahead = states, length, num_heads + 1
        self._target_rows_V = target_rows_V
        self.count = -(-len(states.tokens_P) // length)

    def take(self, windows: np.ndarray) -> Windows:
        """Return windows by their numbers; places past the end have no text."""
        places_BA = windows[:, None] * self._length + np.arange(self._length + self._ahead)
        inside_BA = places_BA < len(self._states.tokens_P)
        places_BA = np.minimum(places_BA, len(self._states.tokens_P) - 1)
        tokens_BA = self._states.tokens_P[places_BA]
        return Windows(
            self._states.hidden_PD[places_BA],
            tokens_BA,
            self._states.positions_P[places_BA],
            np.where(inside_BA, self._states.texts_P[places_BA], -1).astype(np.int32),
            np.where(self._states.predicted_P[places_BA], self._target_rows_V[tokens_BA], NOT_PREDICTED),
        )


def target_rows(vocab_size: int, draft_ids: Sequence[int] | None) -> np.ndarray:
    """Return each token's row in the heads' output, -1 for tokens without one."""
    if draft_ids is None:
        return np.arange(vocab_size, dtype=np.int32)
    rows_V = np.full((vocab_size,), -1, np.int32)
    rows_V[np.asarray(draft_ids)] = np.arange(len(draft_ids), dtype=np.int32)
    return rows_V


def frequent_tokens(
    tokens: np.ndarray, vocab_size: int, count: int, always: Sequence[int] = (), predicted: np.ndarray | None = None
) -> list[int]:
    """Return the ``count`` most frequent tokens, including ``always``; ties go to the lowest id.

    With bools ``predicted``, one for each of ``tokens``, the others only decide ties, before ids do.
    """
    frequency_V = np.bincount(tokens, minlength=vocab_size).astype(np.int64)
    if predicted is not None:
        frequency_V += (len(tokens) + 1) * np.bincount(tokens[predicted], minlength=vocab_size)
    frequency_V[list(always)] = np.iinfo(np.int64).max
    return sorted(np.argsort(-frequency_V, kind="stable")[:count].tolist())
