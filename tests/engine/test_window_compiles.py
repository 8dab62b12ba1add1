"""A window of decoding compiles for a TPU and updates its pools of pages where they lie."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.cache.paged import Pool
from jaxinfer.decoding.state import initial_state
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.engine.programs import NO_CACHE, Rows, compute_chunk, run_window
from jaxinfer.engine.row_axes import row_axes
from jaxinfer.models.decoder import Decoder, abstract_params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.planning.topology import tensor_mesh, without_persistent_cache
from jaxinfer.sampling import SamplingParams, sampling_arrays
from tests.planning.models import LLAMA_2_7B
from tests.planning.test_strategies_compile import check_in_place

pytestmark = pytest.mark.tpu_compile

BACKEND = choose_backend("bfloat16", platform="tpu")
CONFIG = replace(LLAMA_2_7B, num_layers=2)
ROWS, SLOTS, PAGE, PAGES = 8, 2048, 128, 129


def rows_of(batch: int) -> Rows:
    def build() -> Rows:
        sampling = sampling_arrays([SamplingParams()] * batch, [0] * batch, (2,), CONFIG.vocab_size)
        hidden_BD = jnp.zeros((batch, CONFIG.model_dim), BACKEND.compute_dtype)
        return Rows(initial_state([[1]] * batch, [9] * batch, SLOTS, 0, NO_CACHE, sampling), (), hidden_BD)

    return jax.eval_shape(build)


def compiled(function, donated, *arguments):
    """Compile for one chip; the weights' layout is the compiler's choice, as it is where models run."""
    on_chip = NamedSharding(tensor_mesh("v5e:1x1", 1), PartitionSpec())

    def placed(tree):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_chip), tree)

    params, *others = placed(arguments)
    formats = jax.tree.map(lambda _: Format(Layout.AUTO, on_chip), params)
    where = (formats, *jax.tree.map(lambda _: on_chip, others))
    with without_persistent_cache():
        jitted = jax.jit(function, donate_argnums=donated, in_shardings=where)
        return jitted.trace(params, *others).lower(lowering_platforms=("tpu",)).compile()


def pools(backend=BACKEND):
    shape = (CONFIG.num_layers, PAGES, PAGE, backend.cache_lanes(CONFIG.num_kv_heads, CONFIG.head_dim))
    return tuple(Pool(*[jax.ShapeDtypeStruct(shape, backend.cache_dtype)] * 2) for _ in CONFIG.kinds)


def check_pools(program, backend=BACKEND) -> None:
    memory = program.memory_analysis()
    pool_bytes = sum(leaf.dtype.itemsize * np.prod(leaf.shape) for leaf in jax.tree.leaves(pools(backend)))
    check_in_place(memory.alias_size_in_bytes, memory.temp_size_in_bytes, int(pool_bytes), program.as_text() or "")


def number(kind=jnp.int32, *shape):
    return jax.ShapeDtypeStruct(shape, kind)


@pytest.mark.parametrize(
    "cache_dtype", [pytest.param(None, marks=pytest.mark.exhaustive), pytest.param("int8", marks=pytest.mark.slow)]
)
def test_a_window_of_single_tokens_reads_pages_where_they_lie(cache_dtype):
    backend = choose_backend("bfloat16", platform="tpu", cache_dtype=cache_dtype)
    decoder = Decoder(CONFIG, backend)
    function = partial(run_window, decoder, Autoregressive(), row_axes(rows_of), 8)
    table_BX = number(jnp.int32, ROWS, SLOTS // PAGE)
    rows = number(jnp.int32, ROWS), table_BX, number(jnp.bool_, ROWS), number()
    program = compiled(function, (2, 3), abstract_params(CONFIG, BACKEND), (), pools(backend), rows_of(ROWS), *rows)
    assert "attend_pages" in (program.as_text() or "")
    check_pools(program, backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_a_chunk_of_a_prompt_writes_pages_where_they_lie(cache_dtype):
    backend = choose_backend("bfloat16", platform="tpu", cache_dtype=cache_dtype)
    table_1X, tokens_1T = number(jnp.int32, 1, SLOTS // PAGE), number(jnp.int32, 1, 512)
    numbers = number(), number(), number(), number()
    function = partial(compute_chunk, Decoder(CONFIG, backend))
    program = compiled(function, (1,), abstract_params(CONFIG, BACKEND), pools(backend), table_1X, tokens_1T, *numbers)
    assert "attend_pages" in (program.as_text() or "")
    check_pools(program, backend)
