import itertools
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.cpu_kernels.best import finds_best
from jaxinfer.sampling import (
    ROLE_DRAFT,
    SamplingParams,
    draw,
    gumbel,
    log_probabilities,
    request_key,
    transform_logits,
)
from jaxinfer.sampling.draw import best_token
from tests.sampling.rows import arrays_of, history_of, row_of
from tests.toys import float32_backend

V = 300
TRACES = []


@jax.jit
def drawn(logits_BMV, positions_BM, arrays, history, role=0):
    TRACES.append(logits_BMV.shape)
    return draw(logits_BMV, positions_BM, arrays, history, role)


transformed = jax.jit(transform_logits)
MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.1, seed=2, top_p=0.9),
    SamplingParams(temperature=1.1, seed=3, top_k=12, repetition_penalty=1.3),
    SamplingParams(temperature=2.0, seed=4, min_p=0.05, top_k=40, top_p=0.95, logit_bias={5: 1.0}),
    SamplingParams(frequency_penalty=0.5, logit_bias={9: 2.0}, min_new_tokens=5),
    SamplingParams(temperature=0.3, seed=1),
]


@pytest.fixture(scope="module")
def mixed():
    rng = np.random.default_rng(3)
    logits_BMV = rng.normal(size=(len(MIXED), 3, V)).astype(np.float32) * 3
    outputs = [list(rng.integers(0, V, size=4)) for _ in MIXED]
    history = history_of([[5, 6, 7]] * len(MIXED), outputs)
    # NumPy's, so that taking rows of them compiles nothing.
    arrays, history = jax.tree.map(np.asarray, (arrays_of(MIXED, V), history))
    return logits_BMV, np.tile(np.array([7, 8, 9], np.int32), (len(MIXED), 1)), arrays, history


def rows_of(history, rows):
    lengths = history.prompt_lengths_B[rows], history.lengths_B[rows]
    return history._replace(tokens_BS=history.tokens_BS[rows], prompt_lengths_B=lengths[0], lengths_B=lengths[1])


def test_a_row_is_the_same_to_the_bit_alone_and_in_any_batch_and_order(mixed):
    logits_BMV, positions_BM, arrays, history = mixed
    draws = np.asarray(drawn(logits_BMV, positions_BM, arrays, history))
    whole = np.asarray(transformed(logits_BMV, arrays, history, positions_BM))
    for order in [[row] for row in range(len(MIXED))] + [[6, 5, 4, 3, 2, 1, 0], [2, 2, 4, 4, 0, 3, 2]]:
        rows = np.array(order)
        some = logits_BMV[rows], positions_BM[rows], row_of(arrays, order), rows_of(history, rows)
        assert (np.asarray(drawn(*some)) == draws[rows]).all()
        assert np.asarray(transformed(some[0], *some[2:], some[1])).tobytes() == whole[rows].tobytes()


def test_a_node_is_the_same_in_any_number_of_nodes_in_longer_storage_and_a_padded_vocabulary(mixed):
    logits_BMV, positions_BM, arrays, history = mixed
    draws = np.asarray(drawn(logits_BMV, positions_BM, arrays, history))
    longer = history._replace(tokens_BS=np.pad(history.tokens_BS, ((0, 0), (0, 21)), constant_values=-1))
    padded_BMV = np.pad(logits_BMV, ((0, 0), (0, 0), (0, 84)), constant_values=-np.inf)
    for node in range(3):
        one = slice(node, node + 1)
        found = drawn(padded_BMV[:, one], positions_BM[:, one], arrays, longer)
        assert (np.asarray(found) == draws[:, one]).all()


def test_changing_parameters_compiles_nothing(mixed):
    logits_BMV, positions_BM, arrays, history = mixed
    drawn(logits_BMV, positions_BM, arrays, history)
    traces = len(TRACES)
    for params in MIXED:
        drawn(logits_BMV, positions_BM, arrays_of([params] * len(MIXED), V), history)
    assert len(TRACES) == traces > 0


def equations(jaxpr, inside_branches: bool) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name == "cond" and not inside_branches:
            continue
        for inner in inner_jaxprs(equation.params):
            yield from equations(inner, inside_branches)


def inner_jaxprs(params):
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def test_a_greedy_batch_runs_no_noise_truncation_or_penalty_and_nothing_ever_sorts(mixed):
    logits_BMV, positions_BM, arrays, history = mixed
    jaxpr = jax.make_jaxpr(draw)(logits_BMV, positions_BM, arrays, history).jaxpr
    costly = {"exp", "log", "log1p", "while", "scan", "scatter-add", "scatter-min", "shift_left", "reduce_sum"}
    everywhere = set(equations(jaxpr, inside_branches=True))
    assert costly - everywhere <= {"while", "scan"}
    assert everywhere & {"while", "scan"}
    assert not costly & set(equations(jaxpr, inside_branches=False))
    assert not everywhere & {"sort", "top_k"}


def test_greedy_takes_the_lowest_id_of_the_best(mixed):
    logits_BMV, positions_BM, arrays, history = mixed
    logits_BMV = logits_BMV.copy()
    logits_BMV[0, 0], logits_BMV[0, 1] = -1.0, -np.inf
    logits_BMV[0, 0, [17, 40, 299]] = 4.0
    assert MIXED[0] == SamplingParams()
    # Beside rows that draw, and in a batch that does not.
    for order in ([0, 1, 2, 3, 4, 5, 6], [0] * 7):
        draws = drawn(logits_BMV[order], positions_BM, row_of(arrays, order), history)
        assert draws[0, :2].tolist() == [17, 0]


# Less than a vector, its multiples and not, a chunk of the CPU's own kernel, more than one, and a real vocabulary.
ROWS = 9
VOCABULARIES = [1, 257, 4097, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (7, 16, 4096, 50257))]


def check_best(vocab_size, dtype, backend):
    rng = np.random.default_rng(vocab_size)
    # Few values, so that most rows have the highest several times; and rows without a finite score.
    scores_MV = rng.integers(-3, 4, size=(ROWS, vocab_size)).astype(np.float32)
    scores_MV[1], scores_MV[2], scores_MV[3, -1], scores_MV[4] = -np.inf, -1e30, 5.0, np.nan
    scores_MV[5, : vocab_size - 1] = -np.inf
    find = jax.jit(lambda scores: best_token(scores, backend)).lower(jax.ShapeDtypeStruct(scores_MV.shape, dtype))
    has_own = backend == float32_backend() and dtype == jnp.float32 and finds_best(ROWS, vocab_size)
    assert ("jaxinfer_best" in find.as_text()) == has_own
    found = np.asarray(find.compile()(scores_MV.astype(dtype)))
    rows = np.arange(ROWS) != 4
    assert found[rows].tolist() == scores_MV[rows].argmax(axis=-1).tolist()
    assert 0 <= found[4] < vocab_size


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("kernels", ["own", "none"])
def test_the_best_token_is_the_first_of_the_highest_in_any_vocabulary(vocab_size, kernels):
    check_best(vocab_size, jnp.float32, float32_backend() if kernels == "own" else None)


def test_the_best_token_of_other_dtypes_backends_and_shapes():
    own = float32_backend()
    check_best(257, jnp.bfloat16, own)
    check_best(257, jnp.float32, replace(own, cpu_kernels=False))
    assert jax.eval_shape(lambda scores: best_token(scores, own), jnp.zeros((0, 257))).shape == (0,)
    scores_BMV = np.random.default_rng(2).normal(size=(2, 3, 257)).astype(np.float32)
    assert best_token(jnp.asarray(scores_BMV), own).tolist() == scores_BMV.argmax(axis=-1).tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 257, 4096, 4097, 50257])
def test_the_best_token_by_every_dtype_and_backend(vocab_size):
    own = float32_backend()
    for dtype, backend in itertools.product((jnp.float32, jnp.bfloat16), (own, replace(own, cpu_kernels=False), None)):
        check_best(vocab_size, dtype, backend)


def test_a_draw_is_the_best_of_logits_plus_the_published_noise(mixed):
    logits_BMV, _, _, history = mixed
    positions_M = np.array([3, 4, 70], np.int32)
    arrays = arrays_of([SamplingParams(temperature=1.0, seed=21)] * 7, V, samples=[2] * 7)
    noise = jax.jit(gumbel)
    for role in (0, ROLE_DRAFT):
        noise_MV = np.asarray(noise(request_key(21, 2), positions_M, role, np.arange(V)))
        draws = drawn(logits_BMV, np.tile(positions_M, (7, 1)), arrays, history, role)
        assert (np.asarray(draws) == np.argmax(logits_BMV + noise_MV, axis=-1)).all()


FALSE_ALARM = 1e-6
PROBABILITIES = np.array([0.35, 0.25, 0.15, 0.1, 0.07, 0.05, 0.02, 0.01])
NUM_DRAWS = 4000
# Tokens that count as one in tests of pairs, so that every cell expects at least 5 draws.
GROUPS = np.array([0, 1, 2, 2, 3, 3, 3, 3])


def chi_square_passes(draws, expected) -> bool:
    # Imported here: it takes as long as collecting many files.
    from scipy.stats import chi2

    kept = expected > 0
    counts = np.bincount(np.asarray(draws).ravel(), minlength=len(expected))
    if counts[~kept].any():
        return False
    wanted = expected[kept] * counts.sum()
    statistic = ((counts[kept] - wanted) ** 2 / wanted).sum()
    return statistic < chi2.isf(FALSE_ALARM, kept.sum() - 1)


def pairs_pass(first, second) -> bool:
    share = np.bincount(GROUPS, PROBABILITIES)
    pairs = GROUPS[np.asarray(first).ravel()] * 4 + GROUPS[np.asarray(second).ravel()]
    return chi_square_passes(pairs, np.outer(share, share).ravel())


def draws_along(axis: str, params: SamplingParams, role: int = 0) -> np.ndarray:
    """Draw once a row, of which the axis is what differs."""
    numbers = range(NUM_DRAWS)
    rows = [replace(params, seed=n) for n in numbers] if axis == "seed" else [params] * NUM_DRAWS
    arrays = arrays_of(rows, 8, samples=list(numbers) if axis == "sample" else None)
    positions = np.arange(NUM_DRAWS) if axis == "position" else np.full(NUM_DRAWS, 6)
    logits = np.tile(np.log(PROBABILITIES).astype(np.float32), (NUM_DRAWS, 1, 1))
    history = history_of([[1]] * NUM_DRAWS, [[]] * NUM_DRAWS)
    return np.asarray(drawn(logits, positions.astype(np.int32)[:, None], arrays, history, role)).ravel()


@pytest.mark.parametrize("axis", ["position", "seed", "sample"])
def test_draws_follow_the_softmax_along_positions_seeds_and_samples(axis):
    """Chi-square on 8 tokens and 4,000 draws; false-alarm probability 1e-6 each, the seeds being fixed."""
    draws = draws_along(axis, SamplingParams(temperature=1.0, seed=11))
    assert chi_square_passes(draws, PROBABILITIES)
    # Successive draws are independent: the pairs follow the product.
    assert pairs_pass(draws[0::2], draws[1::2])
    # And the tests can fail.
    assert not chi_square_passes(draws, PROBABILITIES[[1, 0, 2, 3, 4, 5, 6, 7]])
    assert not pairs_pass(draws, draws)


def test_truncated_tempered_draws_follow_the_renormalised_softmax():
    """Chi-square with false-alarm probability 1e-6."""
    expected = np.where(np.arange(8) < 4, PROBABILITIES**0.5, 0)
    expected /= expected.sum()
    draws = draws_along("position", SamplingParams(temperature=2.0, seed=12, top_k=5, top_p=0.8))
    assert chi_square_passes(draws, expected)


def test_roles_draw_independently():
    """Chi-square of the pairs with false-alarm probability 1e-6."""
    params = SamplingParams(temperature=1.0, seed=13)
    assert pairs_pass(*(draws_along("position", params, role) for role in (0, ROLE_DRAFT)))


def test_log_probabilities_are_of_the_raw_logits(mixed):
    logits_BMV = mixed[0]
    tokens_BM = np.random.default_rng(8).integers(0, V, size=logits_BMV.shape[:2])
    wide_BMV = logits_BMV.astype(np.float64)
    expected = wide_BMV - np.log(np.exp(wide_BMV).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(expected, tokens_BM[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(jax.jit(log_probabilities)(logits_BMV, tokens_BM), expected, rtol=1e-5)
    half = jax.ShapeDtypeStruct(logits_BMV.shape, jnp.bfloat16)
    assert jax.eval_shape(log_probabilities, half, tokens_BM).dtype == jnp.float32
