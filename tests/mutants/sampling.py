"""Faults of sampling: noise, its keys, and each transform of logits."""

from tests.mutants.fault import Fault

_TRANSFORMS, _NOISE = "jaxinfer/sampling/transforms.py", "jaxinfer/sampling/noise.py"
_THRESHOLD, _MARGINS = "jaxinfer/sampling/threshold.py", "jaxinfer/sampling/margins.py"
_TRUNCATES = "tests/sampling/test_transforms.py::test_truncation_keeps_the_smallest_sets_with_ties_together"
_NEVER_CHANGES = "tests/sampling/test_margins.py::test_a_change_well_under_the_margin_never_changes_the_draw"
_AT_BOUNDARIES = "tests/sampling/test_margins.py::test_a_token_that_would_win_from_outside_is_as_near_as_its_boundary"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a repetition penalty multiplies positive logits too",
        _TRANSFORMS,
        "jnp.where(logits_BMV < 0, logits_BMV * repetition, logits_BMV / repetition)",
        "logits_BMV * repetition",
        "tests/sampling/test_transforms.py",
    ),
    Fault(
        "a repetition penalty forgets the prompt",
        _TRANSFORMS,
        "(output_BMV > 0) | (prompt_counts(history, vocab_size) > 0)[:, None]",
        "output_BMV > 0",
        "tests/sampling/test_transforms.py",
    ),
    Fault(
        "a presence penalty counts occurrences",
        _TRANSFORMS,
        "column(arrays.presence_penalty_B) * (output_BMV > 0)",
        "column(arrays.presence_penalty_B) * output_BMV",
        "tests/sampling/test_transforms.py",
    ),
    Fault(
        "a frequency penalty counts presence",
        _TRANSFORMS,
        "column(arrays.frequency_penalty_B) * output_BMV",
        "column(arrays.frequency_penalty_B) * (output_BMV > 0)",
        "tests/sampling/test_transforms.py",
    ),
    Fault(
        "min_new_tokens bans stops one position too long",
        _TRANSFORMS,
        "positions_BM - history.prompt_lengths_B[:, None] < arrays.min_new_tokens_B[:, None]",
        "positions_BM - history.prompt_lengths_B[:, None] <= arrays.min_new_tokens_B[:, None]",
        "tests/sampling/test_transforms.py",
    ),
    Fault(
        "top-p forgets what top-k dropped",
        _TRANSFORMS,
        "top_p_threshold(tempered_BMV, from_top_k_BM, top_p_BM, backend)",
        "top_p_threshold(tempered_BMV, everything_BM, top_p_BM, backend)",
        "tests/sampling/test_transforms.py",
    ),
    Fault(
        "a padded bias lands on the last token",
        _TRANSFORMS,
        "jnp.where(ids < 0, vocab_size, ids)",
        "jnp.where(ids < 0, vocab_size - 1, ids)",
        "tests/sampling/test_transforms.py",
    ),
    Fault(
        "noise ignores the position",
        _NOISE,
        "gumbel_of_bits(random_bits(fold_in(fold_in(key_data, position), role), token_ids_V))",
        "gumbel_of_bits(random_bits(fold_in(fold_in(key_data, position * 0), role), token_ids_V))",
        "tests/sampling/test_noise.py",
    ),
    Fault(
        "roles of all levels share their noise",
        _NOISE,
        "kind + 3 * level",
        "kind",
        "tests/sampling/test_noise.py",
    ),
    Fault(
        "a seed loses its upper half",
        _NOISE,
        "np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)",
        "np.array([0, seed & 0xFFFFFFFF], np.uint32)",
        "tests/sampling/test_noise.py",
    ),
    Fault(
        "top-k keeps one token less",
        _THRESHOLD,
        "axis=-1, dtype=jnp.int32) >= top_k",
        "axis=-1, dtype=jnp.int32) > top_k",
        _TRUNCATES,
    ),
    Fault(
        "top-p is of all the mass, not of what is kept",
        _THRESHOLD,
        "wanted = jnp.maximum(top_p.astype(logits.dtype) * mass_from(kept_from),",
        "wanted = jnp.maximum(top_p.astype(logits.dtype) * mass_from(jnp.full_like(kept_from, -jnp.inf)),",
        _TRUNCATES,
    ),
    Fault(
        "min-p compares logits with the share itself",
        _THRESHOLD,
        "best_logit(logits) + jnp.log(min_p.astype(logits.dtype))",
        "best_logit(logits) + min_p.astype(logits.dtype) - 1",
        _TRUNCATES,
    ),
    Fault(
        "negative logits are in the wrong order",
        _THRESHOLD,
        "jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)",
        "bits",
        _TRUNCATES,
    ),
    Fault(
        "a top-p that underflows keeps nothing",
        _THRESHOLD,
        "jnp.maximum(top_p.astype(logits.dtype) * mass_from(kept_from), jnp.finfo(logits.dtype).tiny)",
        "top_p.astype(logits.dtype) * mass_from(kept_from)",
        "tests/sampling/test_transforms.py::test_a_top_p_below_float32_keeps_the_best_token",
    ),
    Fault(
        "a tie goes to the highest id",
        "jaxinfer/sampling/draw.py",
        "ids = jnp.min(jnp.where(is_best, vocabulary_ids(vocab_size), vocab_size), axis=-1)",
        "ids = jnp.max(jnp.where(is_best, vocabulary_ids(vocab_size), -1), axis=-1)",
        "tests/sampling/test_draw.py::test_the_best_token_is_the_first_of_the_highest_in_any_vocabulary",
    ),
    Fault(
        "greedy rows draw noise beside rows that sample",
        "jaxinfer/sampling/draw.py",
        "jnp.where(arrays.samples_B()[:, None, None], noise_BMV, 0)",
        "noise_BMV",
        "tests/sampling/test_draw.py::test_greedy_takes_the_lowest_id_of_the_best",
    ),
    Fault(
        "log-probabilities are of bfloat16",
        "jaxinfer/sampling/draw.py",
        "logits_BMV = logits_BMV.astype(jnp.float32)",
        "logits_BMV = logits_BMV.astype(jnp.bfloat16)",
        "tests/sampling/test_draw.py::test_log_probabilities_are_of_the_raw_logits",
    ),
    Fault(
        "a margin ignores what top-k dropped",
        _MARGINS,
        "nearest_BM1 = jnp.maximum(top_k_BM1, min_p_BM1) - change_BM1",
        "nearest_BM1 = jnp.maximum(top_k_BM1, min_p_BM1)",
        _AT_BOUNDARIES,
    ),
    Fault(
        "a drawn token never leaves the top-k",
        _MARGINS,
        "(drawn_logit_BM1 - first_dropped_BM1 <= change_BM1) & (top_k_BM1 > -jnp.inf)",
        "(drawn_logit_BM1 - first_dropped_BM1 < 0) & (top_k_BM1 > -jnp.inf)",
        "tests/sampling/test_margins.py::test_a_drawn_token_leaves_the_top_k_once_the_first_dropped_token_overtakes_it",
    ),
    Fault(
        "a top-k beyond 32 bits wraps",
        "jaxinfer/sampling/arrays.py",
        "min(getattr(row, name), np.iinfo(np.int32).max)",
        "getattr(row, name) % 2**31",
        "tests/sampling/test_params.py::test_a_top_k_beyond_32_bits_does_not_wrap",
    ),
    Fault(
        "ignoring the end keeps its ids",
        "jaxinfer/sampling/arrays.py",
        "() if row.ignore_eos else tuple(eos_token_ids)",
        "tuple(eos_token_ids)",
        "tests/sampling/test_params.py::test_ignoring_the_end_leaves_no_stop_ids",
    ),
)
