"""Compile kernels for TPUs that are not here."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxinfer.planning.topology import tensor_mesh, without_persistent_cache
from pallas_kernels.chips import CHIPS


@functools.cache
def _placed(chip: str) -> SingleDeviceSharding:
    facts = CHIPS[chip]
    mesh = tensor_mesh(f"{chip}:{facts.single}", facts.devices)
    return SingleDeviceSharding(mesh.devices.flat[0])


def first_is_ordinary(cases: Sequence[Any], first: Any = ()) -> list[Any]:
    """Return a test's cases, which begin with the chip; ``first`` marks the first one.

    The wide run has the first of a second chip, the exhaustive run all others.
    """
    second = next(case for case in cases if case[0] == "v6e")
    marks = (first, *(pytest.mark.slow if case is second else pytest.mark.exhaustive for case in cases[1:]))
    return [pytest.param(case, marks=mark) for case, mark in zip(cases, marks)]


def compile_for(
    chip: str, function: Callable[..., Any], arguments: Sequence[Any], donated: tuple[int, ...] = ()
) -> tuple[int, int]:
    """Compile, and return the bytes that are needed besides the arguments, and those that are updated in place."""
    placed = _placed(chip)
    described = [jax.ShapeDtypeStruct(np.shape(argument), argument.dtype, sharding=placed) for argument in arguments]
    with without_persistent_cache():
        traced = jax.jit(function, donate_argnums=donated).trace(*described)
        memory: Any = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    return memory.peak_memory_in_bytes - memory.argument_size_in_bytes, memory.alias_size_in_bytes
