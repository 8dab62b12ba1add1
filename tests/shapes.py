"""A pytest plugin: shapes and kinds of arrays are checked at every call of a function that names them.

``--jaxtyping-packages`` puts a decorator on every function of the packages that it names, and checks arguments twice.
Here it is put where an annotation holds an array, and checks once: everywhere it would double the time of an import and
cost the ordinary run a sixth of its own. What is no array is checked by pyright.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable
from typing import Any

import jaxtyping
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation

_jaxtyped = jaxtyping.jaxtyped
# By a function's code: functions within functions are made anew at each call.
_names_arrays: dict[Any, bool] = {}


def pytest_configure() -> None:
    """Stand in for the decorator, before the library is imported."""
    jaxtyping.jaxtyped = check


def check(fn: Any = None, *, typechecker: Any = None) -> Any:
    """Decorate a function, a method or a dataclass, as ``jaxtyping.jaxtyped`` does, if it names an array.

    What does not fit raises ``jaxtyping.TypeCheckError``.
    """
    if fn is None:
        return functools.partial(check, typechecker=typechecker)
    if isinstance(fn, str):
        return _jaxtyped(fn)
    if isinstance(fn, type):
        if dataclasses.is_dataclass(fn) and _hold_arrays(fn.__annotations__.values()):
            fn.__init__ = _checked(fn.__init__)
        return fn
    if isinstance(fn, classmethod | staticmethod):
        return type(fn)(check(fn.__func__))
    if isinstance(fn, property):
        return property(*(method and check(method) for method in (fn.fget, fn.fset, fn.fdel)))
    code = getattr(fn, "__code__", None)
    if code not in _names_arrays:
        _names_arrays[code] = _hold_arrays(getattr(fn, "__annotations__", {}).values())
    return _checked(fn) if _names_arrays[code] else fn


def _checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    inner = beartype(fn)

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        # The sizes that letters stand for, in this call.
        with _jaxtyped("context"):
            try:
                return inner(*args, **kwargs)
            except BeartypeCallHintViolation as violation:
                raise jaxtyping.TypeCheckError(str(violation)) from violation

    return checked


def _hold_arrays(annotations: Iterable[Any]) -> bool:
    return any(
        issubclass(annotation, jaxtyping.AbstractArray)
        if isinstance(annotation, type) and not typing.get_args(annotation)
        else _hold_arrays(annotation if isinstance(annotation, list) else typing.get_args(annotation))
        for annotation in annotations
    )
