"""Functions of the host that compiled programs call: by number, so that another function compiles nothing anew."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Scores = Callable[..., Any]


class HostCalls:
    """What a program calls, and what went wrong in it; one for all batches of a set of programs.

    A function gets NumPy arrays and returns a float for each row. What it raises is kept for `check`, since an error
    that went through the program would come out as another one; the program gets zeros.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[int, Scores] = {}
        self._errors: dict[int, BaseException] = {}
        self._next = 0

    def open(self, function: Scores) -> int:
        """Return the number under which programs call a function, until it is closed."""
        with self._lock:
            self._next += 1
            self._functions[self._next] = function
            return self._next

    def close(self, number: int) -> None:
        """Forget a function."""
        with self._lock:
            self._functions.pop(number, None)
            self._errors.pop(number, None)

    def check(self, number: int) -> None:
        """Raise what a function raised since the last check."""
        with self._lock:
            error = self._errors.pop(number, None)
        if error is not None:
            raise error

    def scores_B(self, number: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Call a function from inside a traced one; the first array's first axis is the rows'."""
        batch = arrays[0].shape[0]
        found = jax.ShapeDtypeStruct((batch,), np.float32)
        return jax.pure_callback(self._call, found, number, *arrays)

    def _call(self, number: Any, *arrays: Any) -> np.ndarray:
        given = [np.asarray(array) for array in arrays]
        key, nothing = int(number), np.zeros(len(given[0]), np.float32)
        with self._lock:
            function, has_failed = self._functions.get(key), key in self._errors
        if function is None or has_failed:
            return nothing
        try:
            return np.asarray(function(*given), np.float32)
        except BaseException as error:  # an interrupt too: the program's thread is no place for it
            with self._lock:
                self._errors[key] = error
            return nothing
