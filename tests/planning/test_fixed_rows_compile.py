"""With ``exact="bits"`` plain decoding and a tree compile to the same products in the same tiles; what that costs."""

import dataclasses
import re
from collections import Counter

import pytest

from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.models.config import DecoderConfig
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import CompiledProgram, compile_programs
from jaxinfer.planning.given_tree import GivenTree
from jaxinfer.planning.hlo.text import read_program
from jaxinfer.planning.hlo.traffic import multiplied_flops
from jaxinfer.planning.hlo.walk import total
from jaxinfer.planning.known_models import planned_config
from jaxinfer.planning.roofline import Work, roofline
from pallas_kernels.chips import CHIPS
from tests.planning.buffers import copies_of_the_cache, largest_buffers
from tests.planning.models import LLAMA_2_7B

pytestmark = pytest.mark.tpu_compile

SLOTS = 2048
# The same with fewer heads and channels, which compiles sooner.
NARROW = dataclasses.replace(LLAMA_2_7B, model_dim=512, ffn_dim=1024, num_heads=4, num_kv_heads=4, vocab_size=4096)
# What the compiler chose for a product: how much of each operand and of the result it works on at a time.
_TILES = re.compile(r'"(?:\w+_window_bounds|iteration_bounds)":\[[^\]]*\]|"emitter":"\w+"')
# A small tree's relation is computed by products of its own.
_OF_THE_TARGET = 1 << 20


def step(config: DecoderConfig, strategy: Strategy, exact: str, batch: int = 1, devices: int = 1) -> CompiledProgram:
    topology, mesh = "v5e:1x1" if devices == 1 else "v5e:2x4", MeshConfig(tensor=devices)
    options = {"batch": batch, "max_len": SLOTS, "mesh": mesh, "prompt_tokens": None}
    return compile_programs(config, topology, exact=exact, strategy=strategy, **options)["decode"]


def products(program: CompiledProgram) -> Counter[tuple[str, int, int, int]]:
    """Count the products and kernels of the target by opcode, size of the result, operations and runs."""
    return Counter(
        (found.opcode, found.elements, found.flops, found.runs)
        for found in program.instructions()
        if found.flops > _OF_THE_TARGET and not found.branches
    )


def tiles(program: CompiledProgram) -> Counter[tuple[object, ...]]:
    """Count the products with weights by shape and layout of what they work on, and by their tiles."""
    found, read = Counter(), read_program(program.hlo)
    lines = [(inside, line) for inside in read.computations.values() for line in inside.lines.values()]
    for inside, line in lines:
        if multiplied_flops(inside, line) > _OF_THE_TARGET and line.opcode != "custom-call":
            arrays = (line.results, *(inside.lines[name].results for name in line.operands))
            chosen = [tuple(_TILES.findall(user.attributes)) for _, user in lines if user.called == inside.name]
            found[arrays, line.attributes.partition(", metadata=")[0], tuple(chosen)] += 1
    return found


@pytest.mark.parametrize(
    "config",
    [pytest.param(NARROW, marks=pytest.mark.exhaustive), pytest.param(LLAMA_2_7B, marks=pytest.mark.exhaustive)],
    ids=["narrow", "7b"],
)
def test_a_tree_and_plain_decoding_multiply_the_same_shapes(config):
    plain, tree = (step(config, strategy, "bits") for strategy in (Autoregressive(), GivenTree(12)))
    found = products(plain)
    # A layer's seven products with weights and its attention, and the output matrix.
    assert sum(count * runs for (_, _, _, runs), count in found.items()) == 32 * 8 + 1
    assert products(tree) == found
    assert tiles(tree) == tiles(plain)
    assert any("window_bounds" in text for *_, chosen in tiles(plain) for part in chosen for text in part)
    for program in (plain, tree):
        assert program.alias_bytes >= program.cache_bytes, largest_buffers(program.hlo)
        assert copies_of_the_cache(program) == [], largest_buffers(program.hlo)


@pytest.mark.parametrize(
    ("config", "batch", "devices", "least", "most"),
    [
        pytest.param(LLAMA_2_7B, 1, 1, 1.0, 1.01, marks=pytest.mark.exhaustive),
        pytest.param(LLAMA_2_7B, 8, 8, 1.0, 1.03, marks=pytest.mark.exhaustive),
        # Why it is not the default: the logits of 16 nodes are large beside a small model's weights.
        pytest.param(planned_config("smollm2-135m"), 8, 1, 1.03, 1.2, marks=pytest.mark.exhaustive),
    ],
    ids=["7b-1", "7b-8", "135m-8"],
)
def test_what_steps_of_one_size_cost(config, batch, devices, least, most):
    seconds = []
    for exact in ("bits", "margin"):
        found = total(step(config, Autoregressive(), exact, batch, devices).instructions())
        seconds.append(roofline(Work(found.hbm_bytes, found.flops, found.sent_bytes, {}), CHIPS["v5e"], "bfloat16"))
    assert [one.bound for one in seconds] == ["HBM", "HBM"]
    assert least <= seconds[0].seconds / seconds[1].seconds < most
