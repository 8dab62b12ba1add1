"""What a step of `grouped_matmul` reads of experts' kernels, and the vector memory that it takes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.codes import Codes, Form
from pallas_kernels.grouped_matmul.columns import Task, choices, columns_body
from pallas_kernels.grouped_matmul.kernel import rows_body


class Weights(NamedTuple):
    """Kernels of an expert that rows are multiplied by: their number, their size, their form or their dtype's bytes.

    Those in few bits multiply rows of bfloat16.
    """

    kernels: int
    width: int
    channels: int
    item_bytes: int
    form: Form | None = None

    @property
    def name(self) -> str | None:
        """How tuned.json calls the form; None for plain kernels."""
        return self.form and self.form.name

    @property
    def bytes(self) -> int:
        """The bytes of one expert."""
        return self.kernels * self.bytes_of(self.channels)

    def bytes_of(self, channels: int) -> int:
        """Return the bytes of so many channels of one kernel."""
        if self.form is None:
            return channels * self.width * self.item_bytes
        return self.form.weight_bytes(channels * self.width) + (0 if self.form.group else 4 * channels)

    def needed_bytes(self, rows: int, block_f: int) -> int:
        """Return the bytes of vector memory of a step, whose blocks are copied while the step before computes."""
        blocks = rows * self.width * self.item_bytes + self.kernels * self.bytes_of(block_f) + 4 * rows * block_f
        if self.form is None:
            widened = 0
        elif self.form.group:
            widened = self.task(rows).scratch_bytes(block_f)
        else:
            widened = self.kernels * block_f * self.width * self.item_bytes
        return 2 * blocks + 4 * rows * block_f * (self.kernels + 1) + widened

    def task(self, rows: int) -> Task:
        """Return what the kernel of weights in groups does."""
        assert self.form is not None
        return Task(rows, self.width, self.form, self.kernels)


class Reading(NamedTuple):
    """The operands of a kernel that are weights, how a step reads them, what else it holds, and what makes its body.

    The last is called with what finishes products, the number of biases and the precision.
    """

    operands: list[Any]
    specs: list[pl.BlockSpec]
    scratch: list[Any]
    body: Callable[..., Callable[..., None]]


def weights_of(kernels: Sequence[Any]) -> Weights:
    """Describe kernels, all of which are alike."""
    _, channels, width = kernels[0].shape
    if isinstance(kernels[0], Codes):
        return Weights(len(kernels), width, channels, jnp.dtype(jnp.bfloat16).itemsize, kernels[0].form)
    return Weights(len(kernels), width, channels, kernels[0].dtype.itemsize)


def read_weights(kernels: Sequence[Any], weights: Weights, rows: int, block_f: int, is_compiled: bool) -> Reading:
    """Return how a step reads ``block_f`` channels of an expert of each kernel."""
    form, width = weights.form, weights.width

    def of_channels(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, *block), lambda i, first, experts, _, outputs: (first[0] + experts[i], outputs[i], 0)
        )

    def across(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, *block), lambda i, first, experts, _, outputs: (first[0] + experts[i], 0, outputs[i])
        )

    def rows_of_kernels(finish: Any, _: int, precision: Any) -> Callable[..., None]:
        return rows_body(weights.kernels, form, finish, precision)

    if form is None:
        return Reading(list(kernels), [of_channels(block_f, width)] * len(kernels), [], rows_of_kernels)
    parts = [part for kernel in kernels for part in kernel.parts.values()]
    if not form.group:
        parts = [part[:, None] if index % 2 else part for index, part in enumerate(parts)]
    if is_compiled:
        # Else the compiler may copy a whole stack of scales into vector memory.
        parts = [pltpu.with_memory_space_constraint(part, pltpu.HBM) for part in parts]
    if not form.group:
        specs = [of_channels(block_f, width), across(1, block_f)] * len(kernels)
        return Reading(parts, specs, [], rows_of_kernels)
    task = weights.task(rows)
    orders = [jnp.asarray(order, jnp.bfloat16) for order in choices(task)]
    specs = [pl.BlockSpec(order.shape, lambda i, *_: (0, 0)) for order in orders]
    specs += [across(part.shape[1], block_f) for part in parts]
    body = partial(_columns, task)
    return Reading([*orders, *parts], specs, task.scratch(block_f), body)


def _columns(task: Task, finish: Any, num_biases: int, _: Any) -> Callable[..., None]:
    return columns_body(task, finish, num_biases)
