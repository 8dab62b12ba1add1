"""Sampling parameters as arrays, one entry per row, so that other values need no new compilation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar.table import TokenTable
from jaxinfer.notation import Array, Bool, Float, Int, UInt32
from jaxinfer.sampling.noise import request_key
from jaxinfer.sampling.params import SamplingParams

# Padding of bias_ids_BX and stop_ids_BE.
NO_TOKEN = -1
MIN_WIDTH = 8
# Of states and classes of grammars.
MIN_GRAMMAR = 64


class SamplingArrays(NamedTuple):
    """Sampling parameters of B rows, with X bias entries and E stop ids per row, padded with NO_TOKEN.

    ``reports_B`` marks rows that return log-probabilities. Rows with a grammar have its `TokenTable`, of up to N states
    and C classes; where no row has one, N and C are 0.
    """

    temperature_B: Float[Array, "B"]
    top_k_B: Int[Array, "B"]
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]
    repetition_penalty_B: Float[Array, "B"]
    presence_penalty_B: Float[Array, "B"]
    frequency_penalty_B: Float[Array, "B"]
    bias_ids_BX: Int[Array, "B X"]
    bias_values_BX: Float[Array, "B X"]
    key_data_B2: UInt32[Array, "B 2"]
    min_new_tokens_B: Int[Array, "B"]
    stop_ids_BE: Int[Array, "B E"]
    reports_B: Bool[Array, "B"]
    grammar_next_BNC: Int[Array, "B N C"]
    grammar_classes_BV: Int[Array, "B V"]
    grammar_only_BN: Int[Array, "B N"]

    def samples_B(self) -> Bool[Array, "B"]:
        """Mark the rows that draw noise; the others are greedy."""
        return self.temperature_B > 0

    def truncates_B(self) -> Bool[Array, "B"]:
        """Mark the rows that drop tokens by top-k, top-p or min-p."""
        return self.samples_B() & ((self.top_k_B > 0) | (self.top_p_B < 1) | (self.min_p_B > 0))

    def penalizes_B(self) -> Bool[Array, "B"]:
        """Mark the rows that have a penalty."""
        return (self.repetition_penalty_B != 1) | (self.presence_penalty_B != 0) | (self.frequency_penalty_B != 0)

    def biases_B(self) -> Bool[Array, "B"]:
        """Mark the rows that have a logit bias."""
        return (self.bias_ids_BX != NO_TOKEN).any(axis=1)


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidOption for a bias on an id outside the vocabulary."""
    for token in dict(params.logit_bias):
        if token >= vocab_size:
            raise InvalidOption(f"logit_bias names token {token}: the vocabulary has ids 0 to {vocab_size - 1}")


def sampling_arrays(
    params: Sequence[SamplingParams], samples: Sequence[int], eos_token_ids: Sequence[int], vocab_size: int
) -> SamplingArrays:
    """Put each row's parameters, and its sample number, into device arrays.

    The widths X and E are powers of two from 8 up, so that they rarely change. Raise InvalidOption for a bias on an id
    outside the vocabulary.
    """
    biases = [dict(row.logit_bias) for row in params]
    for row in params:
        check_bias(row, vocab_size)
    stops = [() if row.ignore_eos else tuple(eos_token_ids) for row in params]

    def numbers(name: str) -> Any:
        return np.asarray([getattr(row, name) for row in params], np.float32)

    def counts(name: str) -> Any:
        return np.asarray([min(getattr(row, name), np.iinfo(np.int32).max) for row in params], np.int32)

    arrays: dict[str, Any] = {
        "temperature_B": numbers("temperature"),
        "top_k_B": counts("top_k"),
        "top_p_B": numbers("top_p"),
        "min_p_B": numbers("min_p"),
        "repetition_penalty_B": numbers("repetition_penalty"),
        "presence_penalty_B": numbers("presence_penalty"),
        "frequency_penalty_B": numbers("frequency_penalty"),
        "bias_ids_BX": _padded([tuple(bias) for bias in biases], NO_TOKEN, np.int32),
        "bias_values_BX": _padded([tuple(bias.values()) for bias in biases], 0.0, np.float32),
        "key_data_B2": np.stack([request_key(row.seed, sample) for row, sample in zip(params, samples, strict=True)]),
        "min_new_tokens_B": counts("min_new_tokens"),
        "stop_ids_BE": _padded(stops, NO_TOKEN, np.int32),
        "reports_B": np.asarray([row.logprobs for row in params], bool),
        **_grammar_arrays([row.grammar for row in params]),
    }
    # All at once, and made by NumPy: JAX would compile a program for each kind of them.
    return SamplingArrays(**jax.device_put(arrays))


def _grammar_arrays(grammars: Sequence[Any]) -> dict[str, Any]:
    """Return the rows' tables, padded to powers of two."""
    tables = [table for table in grammars if table is not None]
    assert all(isinstance(table, TokenTable) for table in tables), "a grammar that was not compiled"
    num_states, num_classes = (
        _power(max((table.next_NC.shape[axis] for table in tables), default=0)) for axis in (0, 1)
    )
    vocab_size = max((len(table.classes_V) for table in tables), default=0)
    count = len(grammars)
    arrays = {
        "grammar_next_BNC": np.full((count, num_states, num_classes), -1, np.int16),
        "grammar_classes_BV": np.zeros((count, vocab_size), np.int16),
        "grammar_only_BN": np.full((count, num_states), NO_TOKEN, np.int32),
    }
    for row, table in enumerate(grammars):
        if table is not None:
            states, classes = table.next_NC.shape
            arrays["grammar_next_BNC"][row, :states, :classes] = table.next_NC
            arrays["grammar_classes_BV"][row] = table.classes_V
            arrays["grammar_only_BN"][row, :states] = table.only_N
    return arrays


def _power(count: int) -> int:
    """Return the least power of two from `MIN_GRAMMAR` up that is no less; 0 for none."""
    return max(MIN_GRAMMAR, 1 << (count - 1).bit_length()) if count else 0


def _padded(rows: Sequence[Sequence[int | float]], fill: int | float, dtype: type) -> Any:
    width = MIN_WIDTH
    while width < max(len(row) for row in rows):
        width *= 2
    array = np.full((len(rows), width), fill, dtype)
    for index, row in enumerate(rows):
        array[index, : len(row)] = row
    return array
