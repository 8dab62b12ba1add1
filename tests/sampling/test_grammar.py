"""What may come at each node of a tree is what the table says of its state, however it is looked up."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.grammar.table import NO_TOKEN, TokenTable
from jaxinfer.sampling import History, SamplingParams, sampling_arrays
from jaxinfer.sampling.draw import draw
from jaxinfer.sampling.grammar import FREE, keep_to_grammar, states_after_path, states_at_nodes
from tests.toys import float32_backend

VOCAB_SIZE, NUM_STATES, NUM_CLASSES = 301, 7, 70


def drawn_table(rng: np.random.Generator) -> TokenTable:
    """Draw a table in which some token may come in every state."""
    next_NC = np.where(rng.random((NUM_STATES, NUM_CLASSES)) < 0.9, -1, rng.integers(0, NUM_STATES, NUM_CLASSES))
    next_NC[:, 0] = (np.arange(NUM_STATES) + 1) % NUM_STATES
    classes_V = rng.integers(0, NUM_CLASSES, VOCAB_SIZE)
    classes_V[VOCAB_SIZE // 2] = 0
    return TokenTable(classes_V.astype(np.int32), next_NC.astype(np.int32), np.full(NUM_STATES, NO_TOKEN, np.int32))


@pytest.mark.parametrize("num_nodes", [1, 9, 33])
def test_the_best_token_that_may_come_is_drawn(num_nodes):
    rng = np.random.default_rng(num_nodes)
    tables = [drawn_table(rng), None, drawn_table(rng)]
    arrays = sampling_arrays([SamplingParams(grammar=table) for table in tables], [0] * 3, (0,), VOCAB_SIZE)
    states_BM = rng.integers(0, NUM_STATES, (3, num_nodes)).astype(np.int32)
    states_BM[1] = FREE
    # With many equal ones, of which the first is taken.
    logits_BMV = rng.integers(-9, 9, (3, num_nodes, VOCAB_SIZE)).astype(np.float32)
    may_BMV = np.ones(logits_BMV.shape, bool)
    for row in (0, 2):
        may_BMV[row] = tables[row].next_NC[states_BM[row]][:, tables[row].classes_V] >= 0
    expected_BMV = np.where(may_BMV, logits_BMV, -np.inf)
    # Some matrices have more rows than there are tokens.
    filled_BMV = np.pad(logits_BMV, ((0, 0), (0, 0), (0, 3)), constant_values=100)
    found_BMV = jax.jit(keep_to_grammar)(filled_BMV, arrays, states_BM)
    np.testing.assert_array_equal(found_BMV[..., :VOCAB_SIZE], expected_BMV)
    assert (found_BMV[..., VOCAB_SIZE:] == -np.inf).all()
    lengths_B = jnp.full(3, 4, jnp.int32)
    history = History(jnp.zeros((3, 8), jnp.int32), lengths_B, lengths_B, grammar_states_BM=jnp.asarray(states_BM))
    positions_BM = jnp.full((3, num_nodes), 4, jnp.int32)
    own = float32_backend()
    for backend in (own, replace(own, cpu_kernels=False)):
        found_BM = jax.jit(lambda logits, backend=backend: draw(logits, positions_BM, arrays, history, backend=backend))
        assert found_BM(logits_BMV).tolist() == expected_BMV.argmax(axis=-1).tolist()


def test_the_state_at_a_node_is_that_after_its_path():
    rng = np.random.default_rng(6)
    table = drawn_table(rng)
    arrays = sampling_arrays([SamplingParams(grammar=table), SamplingParams()], [0] * 2, (0,), VOCAB_SIZE)
    parents = [0, 0, 0, 2, 1, 3]
    tokens_BM = rng.choice(np.flatnonzero(table.classes_V == 0), (2, 6)).astype(np.int32)
    tokens_BM[0, 4] = np.flatnonzero(table.next_NC[1, table.classes_V] < 0)[0]
    paths = [[], [1], [2], [2, 3], [1, 4], [2, 3, 5]]
    expected = [table.after(tokens_BM[0, path].tolist(), 3) for path in paths]
    parents_BM = jnp.asarray([parents] * 2, jnp.int32)
    found_BM = jax.jit(states_at_nodes)(arrays, jnp.asarray([3, FREE], jnp.int32), jnp.asarray(tokens_BM), parents_BM)
    # After a token that may not come there is no grammar.
    assert found_BM.tolist() == [expected, [FREE] * 6]
    assert expected[4] == FREE


def test_the_state_after_a_path_is_that_after_its_tokens_one_by_one():
    """A row may stop anywhere on its path."""
    rng = np.random.default_rng(5)
    table = drawn_table(rng)
    arrays = sampling_arrays([SamplingParams(grammar=table)] * 4, [0] * 4, (0,), VOCAB_SIZE)
    may_V = np.flatnonzero((table.next_NC[:, table.classes_V] >= 0).all(axis=0))
    tokens = [int(may_V[0])] * 3
    states = [table.after(tokens[:count], 2) for count in range(4)]
    # A chain of nodes, the root before them, of which a second one is refused.
    states_BM = np.tile(np.array([states[0], FREE, *states[1:3]], np.int32), (4, 1))
    path_BJ, tokens_BJ = np.tile(np.array([0, 2, 3], np.int32), (4, 1)), np.tile(np.array(tokens, np.int32), (4, 1))
    taken_B, count_B = np.full(4, 3, np.int32), np.arange(4, dtype=np.int32)
    found_B = jax.jit(states_after_path)(arrays, states_BM, path_BJ, tokens_BJ, taken_B, count_B)
    assert found_B.tolist() == states
