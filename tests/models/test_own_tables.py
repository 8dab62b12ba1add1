"""Each row's own embeddings and logits are those of the tables that its adapter makes of the model's."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer.models.own_tables import own_embeddings, own_logits
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.matmul import product

KERNELS, XLA = choose_backend("float32", "cpu"), choose_backend("float32", "cpu", scan_layers=True)
TPU = replace(XLA, kernels="interpret")
VOCAB, WIDTH, NUMBER, RANK = 40, 24, 4, 8
IDS = np.array([2, -1, 0, 3, 1], np.int32)
TOKENS = np.array([[3, 9, 39], [3, 9, 39], [9, 0, 9], [3, 3, 5], [7, 9, 39]], np.int32)
ROWS = np.array([[9, 39], [3, -1], [-1, -1], [5, 0]], np.int32)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


BASE, LOW = drawn(VOCAB, WIDTH), (drawn(NUMBER, VOCAB, RANK), drawn(NUMBER, RANK, WIDTH))
OWN = {
    "copy_0": drawn(1, VOCAB, WIDTH)[0],
    "copy_1": drawn(2, VOCAB, WIDTH)[1],
    "copy_of": np.array([-1, 1, 0, -1], np.int32),
    "tokens": ROWS,
    "rows": drawn(NUMBER, 2, WIDTH),
}
SHIFT = drawn(NUMBER, VOCAB)


def table_of(adapter: int) -> np.ndarray:
    if adapter < 0:
        return BASE
    copy = OWN["copy_of"][adapter]
    table = (BASE if copy < 0 else OWN[f"copy_{copy}"]).copy()
    for token, row in zip(ROWS[adapter], OWN["rows"][adapter]):
        if token >= 0:
            table[token] = row
    return table + LOW[0][adapter] @ LOW[1][adapter]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(KERNELS, id="kernels"),
        pytest.param(XLA, id="xla"),
        pytest.param(TPU, id="tpu", marks=pytest.mark.slow),
    ],
)
def test_rows_have_their_own_tables_and_others_their_bits(backend):
    def embedded(base, own, tokens, ids):
        plain = embed(base, tokens, backend)
        return plain, own_embeddings(plain, tokens, own, ids, backend)

    def scored(base, own, hidden, ids):
        plain = product(hidden, base, backend)
        return plain, own_logits(plain, hidden, own, ids, backend)

    hidden = drawn(len(IDS), 3, WIDTH)
    own = {**OWN, "ranks": LOW[0], "up": LOW[1]}
    plain_BTD, found_BTD = map(np.asarray, jax.jit(embedded)(BASE, own, TOKENS, IDS))
    own = {**OWN, "down": LOW[1], "up": np.ascontiguousarray(LOW[0].swapaxes(1, 2)), "shift": SHIFT}
    plain_BTV, found_BTV = map(np.asarray, jax.jit(scored)(BASE, own, hidden, IDS))
    for row, adapter in enumerate(IDS):
        table, shift = table_of(adapter), 0 if adapter < 0 else SHIFT[adapter]
        np.testing.assert_allclose(found_BTD[row], table[TOKENS[row]], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found_BTV[row], hidden[row] @ table.T + shift, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found_BTD[1], plain_BTD[1])
    np.testing.assert_array_equal(found_BTV[1], plain_BTV[1])
