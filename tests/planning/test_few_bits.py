"""Plans of weights in few bits: what a device holds and reads of them, and the steps as they are compiled."""

import dataclasses

import jax
import pytest

from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.few_bits.columns import ColumnArray
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import CompiledProgram, compile_programs
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint, decode_floor
from jaxinfer.planning.known_models import planned_config
from jaxinfer.planning.placement import placed_params
from tests.planning.models import LLAMA_2_7B, LLAMA_3_8B

SIZES = {"num_layers": 2, "model_dim": 512, "ffn_dim": 1024, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 1024}
TINY = dataclasses.replace(LLAMA_2_7B, **SIZES)
# A kernel's weights, with scales and minima, over weights in bfloat16.
BITS = {
    "int8": 8,
    "int8:group=64": 8.25,
    "int4:group=64": 4 + 32 / 64,
    "int4:group=128,symmetric=yes": 4 + 16 / 128,
    "nf4:group=64": 4 + 16 / 64,
}
MODELS = {"llama-2-7b": LLAMA_2_7B, "llama-3-8b": LLAMA_3_8B}
# What a v5e holds beside int8: of 7B, 64 rows' caches are short.
LENGTHS = {("llama-2-7b", 64): 128, ("llama-3-8b", 64): 896, ("llama-2-7b", 1): 2048, ("llama-3-8b", 1): 2048}


def deployed(config, weights, topology="v5e:1x1", batch=1, max_len=512, activations=None, **axes) -> Deployment:
    options = {"batch": batch, "max_len": max_len, "prompt_tokens": 16}
    return Deployment(config, topology, MeshConfig(**axes), weights=weights, activations=activations, **options)


def moved_bytes(program: CompiledProgram) -> int:
    """Count what a step always does: only sampling takes other branches."""
    return sum(
        (each.read_bytes + each.written_bytes) * each.runs for each in program.instructions() if not each.branches
    )


@pytest.mark.parametrize(
    "weights", ["int8", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in BITS if each != "int8")]
)
def test_weights_are_counted_in_their_bits(weights):
    plain, found = (count_footprint(deployed(TINY, each)) for each in (None, weights))
    assert found.block_weights == plain.block_weights
    assert found.multiplied_weights == plain.multiplied_weights
    norms, scales = 4 * 512 * 2, 4 * 4 * 2 * (4 * 512 + 2 * 1024 + 512)
    expected = (plain.block_bytes - norms) / 2 * BITS[weights] / 8
    assert 0 <= found.block_bytes - norms - expected <= (scales if weights == "int8" else 0)
    assert found.cache_bytes == plain.cache_bytes


def test_each_device_holds_its_part_of_codes_and_scales():
    whole, part = (
        count_footprint(deployed(TINY, "int4:group=64", topology, tensor=tensor))
        for topology, tensor in (("v5e:1x1", 1), ("v5e:2x2", 4))
    )
    plain = count_footprint(deployed(TINY, None))
    assert part.block_weights * 4 == pytest.approx(whole.block_weights, rel=0.01)
    assert part.block_bytes * 4 == pytest.approx(whole.block_bytes, rel=0.01)
    norms = 4 * 512 * 2
    assert whole.block_bytes - norms == (plain.block_bytes - norms) * BITS["int4:group=64"] / 16


@pytest.mark.parametrize(
    ("weights", "tensor", "message"),
    [
        (
            "int4:group=64",
            8,
            r"weights: blocks.*: its rows of \d+ weights do not split over 8 devices in whole groups",
        ),
        ("gguf", 1, "weights 'gguf': a plan knows no file's blocks; use int8 or int4:group=64"),
        ("int3", 1, "unknown weights 'int3'"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(weights, tensor, message):
    with pytest.raises(InvalidOption, match=message) as caught:
        deployed(
            dataclasses.replace(TINY, ffn_dim=960), weights, "v5e:1x1" if tensor == 1 else "v5e:2x4", tensor=tensor
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", [None, "nf4", "fp8"])
def test_rows_in_bytes_are_planned_with_weights_that_they_multiply(weights):
    with pytest.raises(InvalidOption, match="activations 'int8' multiply weights in int8 or int4: give one of these"):
        deployed(TINY, weights, activations="int8")


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["decode", pytest.param("prefill", marks=pytest.mark.exhaustive)])
def test_a_tiny_models_steps_multiply_codes_where_they_lie(name):
    """By our kernel, of one layer after the other; no weight is widened in memory."""
    deployment = deployed(TINY, "int4:group=64")
    params = placed_params(*deployment.split, deployment.mesh.abstract, deployment.few_bits)
    columns = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if isinstance(leaf, ColumnArray)]
    assert len(columns) == 7
    program = deployment.compile(Autoregressive() if name == "decode" else None)[name]
    products = [each for each in program.instructions() if each.name.startswith("quant_matmul")]
    assert len(products) == 7
    assert {each.runs for each in products} == {2}
    read = sum(each.read_bytes for each in products)
    assert read == pytest.approx((4 * 512 * 512 + 3 * 512 * 1024) * BITS["int4:group=64"] / 8, rel=0.01)
    # One row of a table of bytes is taken where the table lies.
    copies = [each for each in program.instructions() if each.opcode == "copy" and not each.fused]
    assert not any(each.bytes >= 1024 * 512 for each in copies)


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize(("topology", "tensor"), [("v5e:1x1", 1), ("v5e:2x2", 4)])
def test_a_table_in_groups_is_read_and_multiplied_where_it_lies(topology, tensor):
    """One that makes the logits too: no step writes it in other bits, and a token reads the tiles that it lies in."""
    config = dataclasses.replace(TINY, tied_embeddings=True, vocab_size=8192)
    program = deployed(config, "int8:group=64", topology, tensor=tensor).compile()["decode"]
    (taken,) = [each for each in program.instructions() if each.name.startswith("take_columns")]
    assert taken.read_bytes == 128 * (512 + 2 * 8) + 4 * (512 + 8)
    part = 8192 * 512 * BITS["int8:group=64"] // 8 // tensor
    products = [each for each in program.instructions() if each.name.startswith("grouped_matmul") and each.runs == 1]
    assert [part <= each.read_bytes < 1.01 * part for each in products] == [True]
    assert all(each.written_bytes < part // 2 for each in program.instructions() if not each.branches)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "weights",
    [pytest.param("int8", marks=pytest.mark.slow), pytest.param("int4:group=64", marks=pytest.mark.exhaustive)],
)
def test_rows_in_bytes_multiply_codes_where_they_lie(weights):
    """In int32 by the matrix unit, of int8: no weight is widened in memory."""
    program = deployed(TINY, weights, batch=8, activations="int8").compile()["decode"]
    integers = [each for each in program.hlo.splitlines() if " convolution(" in each and "= s32[8," in each]
    assert len(integers) == (7 if weights == "int8" else 0)
    kernels = [each for each in program.instructions() if each.name.startswith("quant_matmul")]
    assert len(kernels) == (0 if weights == "int8" else 7)
    of_layers = [each for each in program.instructions() if not each.branches and each.runs == 2]
    assert all(each.written_bytes < 512 * 512 // 2 for each in of_layers)


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_sums_in_bytes_send_half_of_what_bfloat16_takes():
    """Counted in the compiled program, the layers' sums: each of 512 numbers of 8 rows, with a scale for each 128."""
    sent = {}
    for collectives in (None, "int8"):
        options = {"mesh": MeshConfig(tensor=4), "collectives": collectives, "prompt_tokens": None}
        program = compile_programs(TINY, "v5e:2x2", batch=8, max_len=256, **options)["decode"]
        inside = [each for each in program.collectives() if each.loops == 2 and not each.branches]
        sent[collectives] = sum(each.sent_bytes * each.runs for each in inside)
    assert sent[None] == 2 * 2 * 8 * 512 * 2 * 2 * 3 // 4
    assert sent["int8"] <= 0.52 * sent[None]


def check(model: str, weights: str, batch: int, activations: str | None = None) -> None:
    """HBM traffic is the floor of the quantized weights and the cache, and little is held beside."""
    config, max_len = MODELS[model], LENGTHS.get((model, batch), 1024)
    deployment = deployed(config, weights, batch=batch, max_len=max_len, activations=activations)
    program = deployment.compile()["decode"]
    # 128 tokens' slots are one block of attention and a part of another.
    limit = 1.05 if deployment.max_len > 128 else 1.09
    assert moved_bytes(program) < limit * decode_floor(count_footprint(deployment))
    assert program.temporary_bytes < 0.02 * program.cache_bytes


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("weights", ["int8", "int4:group=64", "int4:group=128"])
@pytest.mark.parametrize("model", MODELS)
def test_decode_on_one_v5e_reads_quantized_weights_and_the_cache_once(model, weights, batch):
    check(model, weights, batch)


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("weights", "batch"), [("int8", 1), ("int8", 8), ("int4:group=64", 8)])
def test_rows_in_bytes_read_the_same_weights_once(weights, batch):
    check("llama-2-7b", weights, batch, "int8")


@pytest.mark.exhaustive
@pytest.mark.tpu_compile
@pytest.mark.timeout(0)
def test_70b_in_four_bits_fits_eight_v5e_chips():
    config = planned_config("llama-3-70b")
    deployment = deployed(config, "int4:group=128", "v5e:2x4", batch=8, max_len=2048, tensor=8)
    program = deployment.compile()["decode"]
    assert program.total_bytes < 15.75 * 2**30
    assert moved_bytes(program) < 1.05 * decode_floor(count_footprint(deployment))
