"""The transforms from raw logits to those drawn from, the same for target, drafter and plain decoding."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rounding import rounded
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.grammar import has_grammars, keep_to_grammar, restricts_any
from jaxinfer.sampling.history import History, output_counts, prompt_counts
from jaxinfer.sampling.threshold import min_p_threshold, top_k_threshold, top_p_threshold


def transform_logits(
    logits_BMV: Float[Array, "B M V"],
    arrays: SamplingArrays,
    history: History,
    positions_BM: Int[Array, "B M"],
    backend: Backend | None = None,
) -> Float[Array, "B M V"]:
    """Apply logit bias, min_new_tokens, penalties, grammar, temperature, top-k, top-p, min-p; dropped tokens are -inf.

    Positions are the drawn tokens' positions in prompt + output. A row at temperature 0 gets only the first four.
    Float64 logits stay float64, all others become float32. Transforms that no row needs are skipped.
    The logits' ``backend`` may have kernels for sums (`jaxinfer.sampling.mass`).
    """
    tempered_BMV = temper(edit_logits(logits_BMV, arrays, history, positions_BM), arrays)
    threshold_BM = truncation_threshold(tempered_BMV, arrays, backend)
    return jnp.where(tempered_BMV >= threshold_BM[..., None], tempered_BMV, -jnp.inf)


def edits_any(arrays: SamplingArrays, history: History, positions_BM: Int[Array, "B M"]) -> Bool[Array, ""]:
    """Tell whether any row's bias, minimum length, penalty or grammar changes logits at these positions."""
    edits, states_BM = edits_numbers(arrays, history, positions_BM), grammar_states(arrays, history)
    return edits if states_BM is None else edits | restricts_any(states_BM)


def edits_numbers(arrays: SamplingArrays, history: History, positions_BM: Int[Array, "B M"]) -> Bool[Array, ""]:
    """Tell whether any row's bias, minimum length or penalty changes logits at these positions."""
    bans_BM = _bans_stop_BM(arrays, history, positions_BM)
    return arrays.biases_B().any() | arrays.penalizes_B().any() | bans_BM.any()


def grammar_states(arrays: SamplingArrays, history: History) -> Int[Array, "B #M"] | None:
    """Return the states after each node; None where grammars do not count, so that programs hold nothing of them."""
    return history.grammar_states_BM if has_grammars(arrays) else None


def edit_logits(
    logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays, history: History, positions_BM: Int[Array, "B M"]
) -> Float[Array, "B M V"]:
    """Apply logit bias, min_new_tokens, penalties and grammar, which also apply to greedy rows."""
    bans_BM = _bans_stop_BM(arrays, history, positions_BM)

    def edited(logits_BMV: Array) -> Array:
        logits_BMV = lax.cond(arrays.biases_B().any(), lambda x: _add_bias(x, arrays), lambda x: x, logits_BMV)
        logits_BMV = lax.cond(bans_BM.any(), lambda x: _ban_stops(x, arrays, bans_BM), lambda x: x, logits_BMV)
        logits_BMV = lax.cond(
            arrays.penalizes_B().any(), lambda x: _penalize(x, arrays, history), lambda x: x, logits_BMV
        )
        states_BM = grammar_states(arrays, history)
        if states_BM is None:
            return logits_BMV
        return lax.cond(
            restricts_any(states_BM), lambda x: keep_to_grammar(x, arrays, states_BM), lambda x: x, logits_BMV
        )

    if logits_BMV.dtype != jnp.float64:
        logits_BMV = logits_BMV.astype(jnp.float32)
    return lax.cond(edits_any(arrays, history, positions_BM), edited, lambda x: x, logits_BMV)


def temper(logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays) -> Float[Array, "B M V"]:
    """Divide by the temperature; greedy rows stay unchanged."""
    divisor_B = jnp.where(arrays.samples_B(), arrays.temperature_B, 1).astype(logits_BMV.dtype)
    # XLA multiplies by the inverse. The choice keeps LLVM from rounding that together with added noise, as `rounded`
    # does, which infinite logits would not survive.
    return jnp.where(jnp.isfinite(logits_BMV), logits_BMV / divisor_B[:, None, None], logits_BMV)


def truncation_threshold(
    tempered_BMV: Float[Array, "B M V"], arrays: SamplingArrays, backend: Backend | None = None
) -> Float[Array, "B M"]:
    """Return the least logit that top-k, top-p and min-p keep; -inf in a row that keeps all tokens."""
    thresholds = truncation_thresholds(tempered_BMV, arrays, backend)
    return jnp.maximum(jnp.maximum(thresholds[0], thresholds[1]), thresholds[2])


def truncation_thresholds(
    tempered_BMV: Float[Array, "B M V"], arrays: SamplingArrays, backend: Backend | None = None
) -> tuple[Float[Array, "B M"], Float[Array, "B M"], Float[Array, "B M"]]:
    """Return the least logits that top-k, then top-p, then min-p keep; -inf for those that are off."""
    shape_BM = tempered_BMV.shape[:2]
    samples_B = arrays.samples_B()
    # Each branch returns one number per node, so skipping it copies nothing.
    everything_BM = jnp.full(shape_BM, -jnp.inf, tempered_BMV.dtype)
    top_k_BM = jnp.broadcast_to(jnp.where(samples_B, arrays.top_k_B, 0)[:, None], shape_BM)
    top_p_BM = jnp.broadcast_to(jnp.where(samples_B, arrays.top_p_B, 1)[:, None], shape_BM)
    min_p_BM = jnp.broadcast_to(jnp.where(samples_B, arrays.min_p_B, 0)[:, None], shape_BM)
    from_top_k_BM = lax.cond(
        ((top_k_BM > 0) & (top_k_BM < tempered_BMV.shape[-1])).any(),
        lambda: top_k_threshold(tempered_BMV, top_k_BM),
        lambda: everything_BM,
    )
    from_top_p_BM = lax.cond(
        (top_p_BM < 1).any(),
        lambda: top_p_threshold(tempered_BMV, from_top_k_BM, top_p_BM, backend),
        lambda: everything_BM,
    )
    from_min_p_BM = lax.cond(
        (min_p_BM > 0).any(), lambda: min_p_threshold(tempered_BMV, min_p_BM), lambda: everything_BM
    )
    return from_top_k_BM, from_top_p_BM, from_min_p_BM


def _bans_stop_BM(arrays: SamplingArrays, history: History, positions_BM: Int[Array, "B M"]) -> Bool[Array, "B M"]:
    return positions_BM - history.prompt_lengths_B[:, None] < arrays.min_new_tokens_B[:, None]


def _add_bias(logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays) -> Float[Array, "B M V"]:
    ids_BX = _dropping_padding(arrays.bias_ids_BX, logits_BMV.shape[-1])
    values_BX = arrays.bias_values_BX.astype(logits_BMV.dtype)

    def add(logits_MV: Array, ids_X: Array, values_X: Array) -> Array:
        return logits_MV.at[:, ids_X].add(values_X[None], mode="drop")

    return jax.vmap(add)(logits_BMV, ids_BX, values_BX)


def _ban_stops(
    logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays, bans_BM: Bool[Array, "B M"]
) -> Float[Array, "B M V"]:
    ids_BE = _dropping_padding(arrays.stop_ids_BE, logits_BMV.shape[-1])
    # A minimum, not an addition: a stop id may occur twice, and nodes past the minimum length must stay unchanged.
    ceiling_BM = jnp.where(bans_BM, -jnp.inf, jnp.inf).astype(logits_BMV.dtype)

    def ban(logits_MV: Array, ids_E: Array, ceiling_M: Array) -> Array:
        return logits_MV.at[:, ids_E].min(ceiling_M[:, None], mode="drop")

    return jax.vmap(ban)(logits_BMV, ids_BE, ceiling_BM)


def _dropping_padding(ids: Int[Array, "B X"], vocab_size: int) -> Int[Array, "B X"]:
    # A negative id would wrap around; an id beyond the vocabulary is dropped.
    return jnp.where(ids < 0, vocab_size, ids)


def _penalize(logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays, history: History) -> Float[Array, "B M V"]:
    vocab_size = logits_BMV.shape[-1]
    output_BMV = output_counts(history, vocab_size)
    seen_BMV = (output_BMV > 0) | (prompt_counts(history, vocab_size) > 0)[:, None]

    def column(values_B: Array) -> Array:
        return values_B.astype(logits_BMV.dtype)[:, None, None]

    repetition = column(arrays.repetition_penalty_B)
    repeated_BMV = jnp.where(logits_BMV < 0, logits_BMV * repetition, logits_BMV / repetition)
    penalized_BMV = jnp.where(seen_BMV, repeated_BMV, logits_BMV)
    penalized_BMV -= column(arrays.presence_penalty_B) * (output_BMV > 0)
    return penalized_BMV - rounded(column(arrays.frequency_penalty_B) * output_BMV)
