"""The best of long rows on a CPU, by blocks, against the best of all."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer.ops.top_k import top_k
from tests.toys import float32_backend

best_of = jax.jit(top_k, static_argnums=(1, 2))


@pytest.mark.parametrize(
    ("size", "count"),
    [
        *((5130, 10), (512, 1)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((16384, 6), (16384, 1), (4097, 8))),
    ],
)
def test_long_rows_have_the_same_best_in_the_same_order(size, count):
    rng = np.random.default_rng(size)
    # Eight kinds of values make most places equals, of which the lowest come first; of 1,500 kinds some are equal whose
    # blocks have unequal maxima.
    values = np.stack([rng.integers(0, kinds, (3, 2, size)) for kinds in (8, 1500)]).astype(np.float32)
    values[:, 0, 0], values[:, 1, 1, 7], values[:, 2, 0, 9:] = -np.inf, np.inf, -np.inf
    integers = np.stack([rng.integers(-kinds, 0, (4, size), np.int32) for kinds in (8, 1500)])
    for array in (values, integers):
        at = np.argsort(-array, axis=-1, kind="stable")[..., :count]
        for backend in (float32_backend(), replace(float32_backend(), platform="tpu")):
            best, places = best_of(array, count, backend)
            np.testing.assert_array_equal(places, at)
            np.testing.assert_array_equal(best, np.take_along_axis(array, at, axis=-1))


def test_only_long_rows_of_a_cpu_are_taken_by_blocks():
    def sorts(size, count, platform):
        backend = replace(float32_backend(), platform=platform)
        described = jax.ShapeDtypeStruct((2, size), np.float32)
        return " sort[" in str(jax.make_jaxpr(lambda values: top_k(values, count, backend))(described))

    assert [sorts(512, 1, "cpu"), sorts(511, 1, "cpu"), sorts(1024, 3, "cpu")] == [True, False, False]
    assert not sorts(512, 1, "tpu")
