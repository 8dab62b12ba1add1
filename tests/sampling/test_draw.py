import itertools
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

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
from tests.sampling.rows import arrays_of, blank_history, history_of, row_of
from tests.toys import float32_backend

V = 300
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
    logits_BMV = jnp.asarray(rng.normal(size=(len(MIXED), 3, V)).astype(np.float32) * 3)
    outputs = [list(rng.integers(0, V, size=4)) for _ in MIXED]
    history = history_of([[5, 6, 7]] * len(MIXED), outputs)
    return logits_BMV, jnp.tile(jnp.array([7, 8, 9]), (len(MIXED), 1)), arrays_of(MIXED, V), history


def test_a_row_is_the_same_to_the_bit_alone_and_in_any_batch_and_order(mixed):
    logits_BMV, positions_BM, arrays, history = mixed
    draws = np.asarray(jax.jit(draw)(logits_BMV, positions_BM, arrays, history))
    transformed = np.asarray(jax.jit(transform_logits)(logits_BMV, arrays, history, positions_BM))
    orders = [[row] for row in range(len(MIXED))] + [[6, 5, 4, 3, 2, 1, 0], [2, 2, 4], [4, 0, 3]]
    for order in orders:
        rows = np.array(order)
        some_history = history._replace(
            tokens_BS=history.tokens_BS[rows],
            prompt_lengths_B=history.prompt_lengths_B[rows],
            lengths_B=history.lengths_B[rows],
        )
        some = (logits_BMV[rows], positions_BM[rows], row_of(arrays, order), some_history)
        assert (np.asarray(jax.jit(draw)(*some)) == draws[rows]).all()
        some_transformed = jax.jit(transform_logits)(some[0], some[2], some[3], some[1])
        assert np.asarray(some_transformed).tobytes() == transformed[rows].tobytes()


def test_a_node_is_the_same_in_any_number_of_nodes_and_in_longer_storage(mixed):
    logits_BMV, positions_BM, arrays, history = mixed
    draws = np.asarray(jax.jit(draw)(logits_BMV, positions_BM, arrays, history))
    longer = history._replace(tokens_BS=jnp.pad(history.tokens_BS, ((0, 0), (0, 21)), constant_values=-1))
    for node in range(3):
        one = slice(node, node + 1)
        assert (jax.jit(draw)(logits_BMV[:, one], positions_BM[:, one], arrays, longer) == draws[:, one]).all()


def test_a_padded_vocabulary_draws_the_same_tokens(mixed):
    logits_BMV, positions_BM, arrays, history = mixed
    padded = jnp.pad(logits_BMV, ((0, 0), (0, 0), (0, 84)), constant_values=-jnp.inf)
    draws = jax.jit(draw)(logits_BMV, positions_BM, arrays, history)
    assert (jax.jit(draw)(padded, positions_BM, arrays, history) == draws).all()


def test_changing_parameters_compiles_nothing(mixed):
    logits_BMV, positions_BM, _, history = mixed
    traces = []

    def counted(*args):
        traces.append(None)
        return draw(*args)

    program = jax.jit(counted)
    for params in MIXED:
        program(logits_BMV, positions_BM, arrays_of([params] * len(MIXED), V), history)
    assert len(traces) == 1


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
    *_, arrays, _ = mixed
    logits = np.full((1, 2, V), -1.0, np.float32)
    logits[0, 0, [17, 40, 299]] = 4.0
    logits[0, 1] = -np.inf
    draws = jax.jit(draw)(jnp.asarray(logits), jnp.array([[1, 2]]), row_of(arrays, [0]), blank_history(1))
    assert draws.tolist() == [[17, 0]]


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 257, 4096, 4097, 50257])
def test_the_best_token_is_the_first_of_the_highest_in_any_vocabulary(vocab_size):
    rng = np.random.default_rng(vocab_size)
    # Few values, so that most rows have the highest several times; and rows without a finite score.
    scores_MV = rng.integers(-3, 4, size=(9, vocab_size)).astype(np.float32)
    scores_MV[1], scores_MV[2], scores_MV[3, -1], scores_MV[4] = -np.inf, -1e30, 5.0, np.nan
    scores_MV[5, : vocab_size - 1] = -np.inf
    rows = [row for row in range(9) if row != 4]
    own = float32_backend()
    for dtype, backend in itertools.product((jnp.float32, jnp.bfloat16), (own, replace(own, kernel_rows=0), None)):
        find = jax.jit(lambda scores, backend=backend: best_token(scores, backend))
        has_own = backend is own and dtype == jnp.float32 and finds_best(9, vocab_size)
        assert ("jaxinfer_best" in find.lower(jnp.asarray(scores_MV, dtype)).as_text()) == has_own
        found = find(jnp.asarray(scores_MV, dtype))
        assert found[np.array(rows)].tolist() == scores_MV[rows].argmax(axis=-1).tolist()
        assert 0 <= found[4] < vocab_size
    assert best_token(jnp.zeros((0, vocab_size)), own).shape == (0,)
    assert best_token(jnp.asarray(scores_MV[:6].reshape(2, 3, -1)), own).shape == (2, 3)


def test_a_draw_is_the_best_of_logits_plus_the_published_noise():
    logits = np.random.default_rng(5).normal(size=(1, 4, V)).astype(np.float32)
    positions = jnp.array([[3, 4, 70, 71]])
    arrays = arrays_of([SamplingParams(temperature=1.0, seed=21)], V, samples=[2])
    for role in (0, ROLE_DRAFT):
        noise = gumbel(request_key(21, 2), positions, role, jnp.arange(V))
        draws = draw(jnp.asarray(logits), positions, arrays, blank_history(1), role)
        assert (np.asarray(draws) == np.argmax(logits + np.asarray(noise), axis=-1)).all()


FALSE_ALARM = 1e-6
PROBABILITIES = np.array([0.35, 0.25, 0.15, 0.1, 0.07, 0.05, 0.02, 0.01])
NUM_DRAWS = 4000
# Tokens that count as one in tests of pairs, so that every cell expects at least 5 draws.
GROUPS = np.array([0, 1, 2, 2, 3, 3, 3, 3])


def chi_square_passes(draws, expected) -> bool:
    kept = expected > 0
    counts = np.bincount(np.asarray(draws).ravel(), minlength=len(expected))
    if counts[~kept].any():
        return False
    wanted = expected[kept] * counts.sum()
    statistic = ((counts[kept] - wanted) ** 2 / wanted).sum()
    return statistic < scipy.stats.chi2.isf(FALSE_ALARM, kept.sum() - 1)


def pairs_pass(first, second) -> bool:
    share = np.bincount(GROUPS, PROBABILITIES)
    pairs = GROUPS[np.asarray(first).ravel()] * 4 + GROUPS[np.asarray(second).ravel()]
    return chi_square_passes(pairs, np.outer(share, share).ravel())


def draws_along(axis: str, params: SamplingParams) -> np.ndarray:
    logits = jnp.asarray(np.log(PROBABILITIES), jnp.float32)
    if axis == "position":
        arrays = arrays_of([params], 8)
        logits, positions = jnp.tile(logits, (1, NUM_DRAWS, 1)), jnp.arange(NUM_DRAWS)[None]
    else:
        numbers = range(NUM_DRAWS)
        rows = [SamplingParams(**{**vars(params), "seed": n if axis == "seed" else 0}) for n in numbers]
        arrays = arrays_of(rows, 8, samples=list(numbers) if axis == "sample" else None)
        logits, positions = jnp.tile(logits, (NUM_DRAWS, 1, 1)), jnp.full((NUM_DRAWS, 1), 6)
    return np.asarray(jax.jit(draw)(logits, positions, arrays, blank_history(logits.shape[0]))).ravel()


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
    arrays = arrays_of([SamplingParams(temperature=1.0, seed=13)], 8)
    logits = jnp.tile(jnp.asarray(np.log(PROBABILITIES), jnp.float32), (1, NUM_DRAWS, 1))
    positions = jnp.arange(NUM_DRAWS)[None]
    target, draft = (jax.jit(draw)(logits, positions, arrays, blank_history(1), role) for role in (0, ROLE_DRAFT))
    assert pairs_pass(target, draft)


def test_log_probabilities_are_of_the_raw_logits(mixed):
    logits_BMV = mixed[0]
    tokens_BM = jnp.asarray(np.random.default_rng(8).integers(0, V, size=logits_BMV.shape[:2]))
    expected = jax.nn.log_softmax(logits_BMV, axis=-1)
    expected = np.take_along_axis(np.asarray(expected), np.asarray(tokens_BM)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(log_probabilities(logits_BMV, tokens_BM), expected, rtol=1e-5)
    assert log_probabilities(logits_BMV.astype(jnp.bfloat16), tokens_BM).dtype == jnp.float32
