"""Every strategy's step compiles for one v5e chip at Llama-2-7B size, its cache updated where it lies."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.decoding.draft_model import DraftModel
from jaxinfer.decoding.draft_trees import read_tree
from jaxinfer.decoding.medusa import Medusa
from jaxinfer.decoding.registry import STRATEGIES, parse_strategy
from jaxinfer.decoding.streams import Streams, read_product
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.stream_heads import StreamsConfig, init_streams
from jaxinfer.ops.backend import choose_backend
from jaxinfer.planning.compile import compile_programs
from tests.planning.models import LLAMA_2_7B, LLAMA_68M

pytestmark = pytest.mark.tpu_compile

DRAFTING = choose_backend("bfloat16", platform="tpu")


def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def four_heads() -> dict:
    """Describe Medusa heads of one block each, over the model's own output matrix."""
    width = LLAMA_2_7B.model_dim
    block = {"kernel": bfloat16(width, width), "bias": bfloat16(width)}
    return {"heads": tuple({"blocks": (block,)} for _ in range(4))}


def streams() -> dict:
    """Describe three streams in the top four layers."""
    described = StreamsConfig(num_streams=3, num_layers=4, rank=8, exit_rank=8)
    return jax.eval_shape(lambda key: init_streams(described, LLAMA_2_7B, DRAFTING, key), jax.random.key(0))


CASES = {
    "autoregressive": parse_strategy("autoregressive"),
    "draft_model": DraftModel(
        schedule="bass", config=LLAMA_68M, backend=DRAFTING, weights=abstract_params(LLAMA_68M, DRAFTING)
    ),
    "prompt_lookup": parse_strategy("prompt_lookup"),
    "jacobi": parse_strategy("jacobi"),
    "lookahead": parse_strategy("lookahead:window=7,ngram=5,guesses=7"),
    "layerskip": parse_strategy("layerskip:exit_layer=8"),
    "medusa": Medusa(paths=read_tree("mc_sim_7b_63"), extra=four_heads()),
    "streams": Streams(paths=read_product("4.2.1"), num_layers=4, keep_nodes=8, extra=streams()),
}


@pytest.mark.parametrize("strategy", CASES.values(), ids=CASES)
def test_a_step_copies_no_cache(strategy):
    """Temporaries stay under a twentieth of the cache, of which a copy would take half."""
    max_len = -(-(2048 + strategy.headroom) // 16) * 16
    program = compile_programs(LLAMA_2_7B, "v5e:1x1", batch=1, max_len=max_len, tensor=1, strategy=strategy)["decode"]
    assert program.alias_bytes >= program.cache_bytes
    assert program.temporary_bytes < 0.05 * program.cache_bytes


def test_no_strategy_is_left_out():
    """But beam search, which has a loop of its own, and TriForce, whose choice of chunks copies the cache."""
    assert set(CASES) | {"beam", "triforce"} == set(STRATEGIES)
