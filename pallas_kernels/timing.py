"""How long an op takes on the device that is here."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

_LONG_SECONDS = 0.05
_MOST_CALLS = 2000
_ATTEMPTS = 3


def seconds_a_call(function: Callable[..., Any], arguments: Sequence[Any], expected_seconds: float | None) -> float:
    """Return the time of one call among many that follow each other on the device, without that of starting them.

    Twice as many calls are timed against as many; where it is not known how long one takes, two against one. What
    returns a tuple, such as updated caches, takes it as the first arguments of the next call.
    """

    def again(_: Any, carried: tuple[Any, ...]) -> tuple[Any, ...]:
        result = function(*carried, *arguments[len(carried) :])
        if isinstance(result, tuple | list):
            return tuple(result)
        # The next call waits for this one, and is not the same to the compiler.
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
