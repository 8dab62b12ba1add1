import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling import SamplingParams, transform_logits
from tests.sampling.reference import edited, truncated
from tests.sampling.rows import EOS, arrays_of, blank_history, history_of

V = 40
transform = jax.jit(transform_logits)

CASES = {
    "bias": SamplingParams(logit_bias={3: 2.5, 39: -4.0, 0: -np.inf}),
    "min_new_tokens": SamplingParams(min_new_tokens=3),
    "repetition": SamplingParams(repetition_penalty=1.4),
    "presence": SamplingParams(presence_penalty=0.7),
    "frequency": SamplingParams(frequency_penalty=-0.4),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=0.6, top_k=5),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "min_p": SamplingParams(temperature=1.3, min_p=0.1),
    "all": SamplingParams(
        temperature=1.7,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={7: 3.0},
        min_new_tokens=9,
    ),
    "all but greedy": SamplingParams(top_k=2, top_p=0.1, min_p=0.9, repetition_penalty=1.2, logit_bias={7: 3.0}),
}


@pytest.fixture(scope="module")
def logits_V():
    return np.random.default_rng(0).normal(size=V).astype(np.float32) * 3


def one_row(logits_V, params, prompt, output):
    position = jnp.array([[len(prompt) + len(output)]])
    arrays = arrays_of([params], V)
    return np.asarray(transform(jnp.asarray(logits_V)[None, None], arrays, history_of([prompt], [output]), position))


@pytest.mark.parametrize("name", CASES)
def test_each_transform_is_the_references_and_does_something(name, logits_V):
    params, prompt, output = CASES[name], [5, 6, 7, 7], [7, 11, 11]
    output = output[: params.min_new_tokens - 1] if name == "min_new_tokens" else output
    result = one_row(logits_V, params, prompt, output)[0, 0]
    expected = truncated(edited(logits_V, params, prompt, output, [EOS]), params)
    np.testing.assert_allclose(result, expected, rtol=2e-6)
    assert (result != logits_V).any()


def test_minimum_length_ends_when_it_is_reached(logits_V):
    params = SamplingParams(min_new_tokens=2)
    banned = [one_row(logits_V, params, [5], [6] * length)[0, 0, EOS] == -np.inf for length in range(4)]
    assert banned == [True, True, False, False]


def test_transforms_that_are_off_change_no_bit(logits_V):
    params = SamplingParams(temperature=1.0, top_k=V, top_p=1.0, min_p=0.0)
    # The second row keeps the branches running.
    arrays = arrays_of([params, CASES["all"]], V)
    logits = np.stack([logits_V, logits_V])[:, None]
    history = history_of([[5]] * 2, [[6]] * 2)
    result = np.asarray(transform(jnp.asarray(logits), arrays, history, jnp.array([[2], [2]])))
    assert result[0].tobytes() == logits[0].tobytes()
    assert (result[1] != logits[1]).any()


def test_a_tree_node_counts_its_ancestors_as_output_but_not_the_root(logits_V):
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, min_new_tokens=4)
    prompt, output = [5, 6], [7, 8]
    node_tokens, parents = [8, 9, 10, 9, 9], [None, 0, 0, 1, 3]
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*([] if parent is None else paths[parent]), node])
    ancestors = np.zeros((1, 5, 5), bool)
    for node, path in enumerate(paths):
        ancestors[0, node, path] = True
    history = history_of([prompt], [output])._replace(
        node_tokens_BM=jnp.array([node_tokens]), ancestors_BMM=jnp.asarray(ancestors)
    )
    positions = jnp.array([[3 + len(path) for path in paths]])
    logits = np.random.default_rng(1).normal(size=(1, 5, V)).astype(np.float32) * 3
    result = np.asarray(transform(jnp.asarray(logits), arrays_of([params], V), history, positions))
    for node, path in enumerate(paths):
        path_output = output + [node_tokens[step] for step in path[1:]]
        expected = edited(logits[0, node], params, prompt, path_output, [EOS])
        np.testing.assert_allclose(result[0, node], expected, rtol=2e-6)


def test_a_top_p_below_float32_keeps_the_best_token(logits_V):
    result = one_row(logits_V, SamplingParams(temperature=1.0, top_p=1e-60), [5], [])[0, 0]
    assert np.flatnonzero(result > -np.inf).tolist() == [logits_V.argmax()]


def test_a_negative_id_counts_as_no_token(logits_V):
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    assert (one_row(logits_V, params, [-1], [-2])[0, 0] == logits_V).all()


levels = st.lists(st.sampled_from([-np.inf, -8.0, -1.5, -0.0, 0.0, 0.25, 1.0, 3.0]), min_size=V, max_size=V)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(levels.filter(lambda row: max(row) > -np.inf), st.integers(1, V + 3), st.floats(1e-30, 1), st.floats(0, 1))
def test_truncation_keeps_the_smallest_sets_with_ties_together(row, top_k, top_p, min_p):
    logits_V = np.array(row, np.float32)
    top_p, min_p = float(np.float32(top_p)), float(np.float32(min_p))

    def kept(**options):
        arrays = arrays_of([SamplingParams(temperature=1.0, **options)], V)
        history = blank_history(1)
        result = transform(jnp.asarray(logits_V)[None, None], arrays, history, jnp.array([[1]]))
        result = np.asarray(result)[0, 0]
        assert ((result == logits_V) | (result == -np.inf)).all()
        return np.where(result == -np.inf, -np.inf, logits_V)

    by_k = kept(top_k=top_k)
    expected = logits_V >= np.sort(logits_V)[-min(top_k, V)]
    np.testing.assert_array_equal(by_k, np.where(expected, logits_V, -np.inf))

    def mass(mask, of):
        return np.exp(of[mask].astype(np.float64)).sum()

    both = kept(top_k=top_k, top_p=top_p)
    if top_p < 1:
        total, least = mass(by_k > -np.inf, by_k), both[both > -np.inf].min()
        np.testing.assert_array_equal(both, np.where(by_k >= least, by_k, -np.inf))
        assert mass(both > -np.inf, by_k) >= top_p * total * (1 - 1e-6)
        assert mass(by_k > least, by_k) < top_p * total * (1 + 1e-6)

    by_min_p = kept(min_p=min_p)
    ratio = np.exp(logits_V.astype(np.float64) - logits_V.max())
    assert (by_min_p[ratio > min_p * (1 + 1e-5)] > -np.inf).all()
    assert (by_min_p[ratio < min_p * (1 - 1e-5)] == -np.inf).all()


def test_float64_logits_stay_float64_down_to_the_last_bit_of_a_threshold():
    with jax.enable_x64(True):
        logits = np.linspace(0, 1e-12, V) + 1.0
        arrays = arrays_of([SamplingParams(temperature=1.0, top_k=3)], V)
        result = jax.jit(transform_logits)(jnp.asarray(logits)[None, None], arrays, blank_history(1), jnp.array([[1]]))
        assert result.dtype == jnp.float64
        np.testing.assert_array_equal(np.flatnonzero(np.asarray(result[0, 0]) > -np.inf), [V - 3, V - 2, V - 1])
        arrays = arrays_of([SamplingParams(temperature=1.0, top_p=0.5)], V)
        result = jax.jit(transform_logits)(jnp.asarray(logits)[None, None], arrays, blank_history(1), jnp.array([[1]]))
        assert int((result > -np.inf).sum()) == V // 2


def test_half_precision_logits_become_float32(logits_V):
    half = jnp.asarray(logits_V, jnp.bfloat16)[None, None]
    result = transform(half, arrays_of([SamplingParams(temperature=0.7)], V), blank_history(1), jnp.array([[1]]))
    expected = transform(
        half.astype(jnp.float32), arrays_of([SamplingParams(temperature=0.7)], V), blank_history(1), jnp.array([[1]])
    )
    assert result.dtype == jnp.float32
    assert (result == expected).all()
