"""With ``exact="bits"`` the compiled steps of plain decoding and of a tree have the same products; what that costs."""

import dataclasses
from collections import Counter

import pytest

from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.models.config import DecoderConfig
from jaxinfer.planning.compile import CompiledProgram, compile_programs
from jaxinfer.planning.given_tree import GivenTree
from jaxinfer.planning.hlo.walk import total
from tests.planning.buffers import copies_of_the_cache, largest_buffers
from tests.planning.models import LLAMA_2_7B

pytestmark = pytest.mark.tpu_compile

SLOTS = 2048
# The same with fewer heads and channels, which compiles sooner.
NARROW = dataclasses.replace(LLAMA_2_7B, model_dim=1024, ffn_dim=2816, num_heads=8, num_kv_heads=8)
# A small tree's relation is computed by products of its own.
_OF_THE_TARGET = 1 << 20


def step(config: DecoderConfig, strategy: Strategy, exact: str, batch: int = 1) -> CompiledProgram:
    programs = compile_programs(
        config, "v5e:1x1", batch=batch, max_len=SLOTS, prompt_tokens=None, exact=exact, strategy=strategy
    )
    return programs["decode"]


def products(program: CompiledProgram) -> Counter[tuple[str, int, int, int]]:
    """Count the products and kernels of the target by opcode, size of the result, operations and runs."""
    return Counter(
        (found.opcode, found.elements, found.flops, found.runs)
        for found in program.instructions()
        if found.flops > _OF_THE_TARGET and not found.branches
    )


@pytest.mark.parametrize("config", [NARROW, pytest.param(LLAMA_2_7B, marks=pytest.mark.slow)], ids=["narrow", "7b"])
def test_a_tree_and_plain_decoding_multiply_the_same_shapes(config):
    plain, tree = (step(config, strategy, "bits") for strategy in (Autoregressive(), GivenTree(12)))
    found = products(plain)
    # A layer's seven products with weights and its attention, and the output matrix.
    assert sum(count * runs for (_, _, _, runs), count in found.items()) == 32 * 8 + 1
    assert products(tree) == found
    for program in (plain, tree):
        assert program.alias_bytes >= program.cache_bytes, largest_buffers(program.hlo)
        assert copies_of_the_cache(program) == [], largest_buffers(program.hlo)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "most"), [(1, 1.03), (8, 1.2)])
def test_what_steps_of_one_size_move(batch, most):
    steps = (step(LLAMA_2_7B, Autoregressive(), exact, batch) for exact in ("bits", "margin"))
    bits, margin = (total(one.instructions()).hbm_bytes for one in steps)
    assert 1 <= bits / margin < most
