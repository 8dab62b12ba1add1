"""Measures an op's time on this machine's device."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

_LONG_SECONDS = 0.05
_MOST_CALLS = 2000
_ATTEMPTS = 3


def seconds_a_call(function: Callable[..., Any], arguments: Sequence[Any], expected_seconds: float | None) -> float:
    """Return the time per call of many calls in sequence on the device, without the time to start them.

    It subtracts the time of n calls from that of 2n; n is one if the expected time is unknown. A tuple result, such as
    updated caches, becomes the first arguments of the next call.
    """

    def again(_: Any, carried: tuple[Any, ...]) -> tuple[Any, ...]:
        result = function(*carried, *arguments[len(carried) :])
        if isinstance(result, tuple | list):
            return tuple(result)
        # The next call depends on this result, so the compiler cannot merge the two.
        return jax.lax.optimization_barrier((carried[0], result))[:1]

    def repeat(count: jax.Array, carried: tuple[Any, ...]) -> tuple[Any, ...]:
        return jax.lax.fori_loop(0, count, again, carried)

    result = jax.eval_shape(function, *arguments)
    carried = tuple(arguments[: len(result) if isinstance(result, tuple | list) else 1])
    calls = 1
    if expected_seconds is not None:
        calls = max(4, min(_MOST_CALLS, round(_LONG_SECONDS / expected_seconds)))
    compiled = jax.jit(repeat)

    def best_seconds(count: int) -> float:
        seconds = []
        for _ in range(_ATTEMPTS):
            began = time.perf_counter()
            jax.block_until_ready(compiled(count, carried))
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    best_seconds(calls)
    return max(best_seconds(2 * calls) - best_seconds(calls), 0.0) / calls
