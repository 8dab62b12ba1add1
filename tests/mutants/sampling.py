"""Faults of sampling: noise, its keys, and each transform of logits."""

from tests.mutants.fault import Fault

_TRANSFORMS, _NOISE = "jaxinfer/sampling/transforms.py", "jaxinfer/sampling/noise.py"

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
        "top_p_threshold(tempered_BMV, from_top_k_BM, top_p_BM)",
        "top_p_threshold(tempered_BMV, everything_BM, top_p_BM)",
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
)
