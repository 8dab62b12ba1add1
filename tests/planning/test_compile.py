"""The library's own prefill and decode, compiled for TPUs that are not here."""

import dataclasses
import time
from collections import Counter

import jax
import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import CompiledProgram, DoesNotFit, compile_programs
from tests.planning.models import LLAMA_2_7B, LLAMA_3_8B

pytestmark = pytest.mark.tpu_compile

SLOTS = 2048
LONG = 1 << 16  # a cache of so many slots does not go into vector memory
TINY = dataclasses.replace(LLAMA_2_7B, num_layers=2, model_dim=256, ffn_dim=512, num_heads=2, num_kv_heads=2)

# A peak counts what is fetched ahead into vector memory, here the whole of a device's output matrix. Without that it
# is of main memory and of what the program computes.
NO_PREFETCH = {"xla_vf_vmem_max_outstanding_prefetches": "0"}


@pytest.fixture(scope="module")
def one_chip() -> dict[str, CompiledProgram]:
    return compile_programs(LLAMA_2_7B, "v5e:1x1", batch=1, max_len=SLOTS)


@pytest.fixture(scope="module")
def eight_chips() -> dict[str, CompiledProgram]:
    return compile_programs(LLAMA_2_7B, "v5e:2x4", batch=8, max_len=SLOTS, mesh=MeshConfig(tensor=8), prompt_tokens=128)


@pytest.fixture(scope="module")
def grouped_heads() -> dict[str, CompiledProgram]:
    return compile_programs(LLAMA_3_8B, "v6e:2x4", batch=8, max_len=SLOTS, mesh=MeshConfig(tensor=8), prompt_tokens=16)


def _copies_of_the_cache(program: CompiledProgram) -> list[str]:
    """Return what stores as much as all keys, other than the writes of new rows in place."""
    copying = ("copy", "copy-start", "transpose", "convert", "all-gather", "all-gather-start")
    return [
        instruction.name
        for instruction in program.instructions()
        if instruction.opcode in copying and not instruction.fused and instruction.bytes >= program.cache_bytes // 2
    ]


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_llama_2_7b_fits_one_chip_of_16_gib_and_writes_its_cache_in_place(one_chip, name):
    program = one_chip[name]
    assert program.cache_bytes == 2 * 32 * SLOTS * 4096 * 2
    assert program.argument_bytes + program.temporary_bytes <= 15.75 * 2**30
    assert program.peak_bytes <= 15.75 * 2**30
    assert program.alias_bytes >= program.cache_bytes
    assert program.total_bytes - program.argument_bytes - program.temporary_bytes < 4096
    assert _copies_of_the_cache(program) == []


def test_decode_on_one_chip_communicates_with_none(one_chip):
    assert one_chip["decode"].collectives() == []


@pytest.mark.parametrize("programs", ["eight_chips", "grouped_heads"])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_weights_and_cache_split_by_heads_leave_an_eighth_to_each_chip(programs, name, request):
    program = request.getfixturevalue(programs)[name]
    config = LLAMA_2_7B if programs == "eight_chips" else LLAMA_3_8B
    lanes = config.num_kv_heads * config.head_dim
    assert program.cache_bytes == 2 * 32 * 8 * SLOTS * lanes * 2 // 8
    assert program.alias_bytes >= program.cache_bytes
    assert _copies_of_the_cache(program) == []
    num_weights = 32 * (2 * 4096 * (4096 + lanes) + 3 * 4096 * config.ffn_dim) + 2 * config.vocab_size * 4096
    assert program.argument_bytes - program.cache_bytes == pytest.approx(num_weights * 2 / 8, rel=0.01)


def test_decode_uses_less_than_a_fiftieth_of_its_cache_beyond_its_arguments(eight_chips):
    """Besides, it copies no weight: both programs read the weights in one order."""
    decode = compile_programs(
        LLAMA_2_7B,
        "v5e:2x4",
        batch=8,
        max_len=SLOTS,
        mesh=MeshConfig(tensor=8),
        prompt_tokens=None,
        compiler_options=NO_PREFETCH,
    )["decode"]
    assert decode.beyond_arguments_bytes < 0.02 * decode.cache_bytes
    assert eight_chips["decode"].temporary_bytes < 0.02 * eight_chips["decode"].cache_bytes
    orders = [
        jax.tree.map(lambda format: format.layout.major_to_minor, program.parameter_formats)
        for program in eight_chips.values()
    ]
    assert orders[0] == orders[1]


def test_on_a_mesh_kernels_read_weights_and_cache_once(eight_chips):
    """Each device attends to its own heads; a layer moves at most a tenth more than it must."""
    decode = eight_chips["decode"]
    inside = [found for found in decode.instructions() if found.loops == 2 and not found.branches]
    assert any(found.name.startswith("attend_cache") for found in inside)
    moved = sum(found.read_bytes + found.written_bytes for found in inside)
    weights = 2 * (4 * 4096 * 4096 + 3 * 4096 * LLAMA_2_7B.ffn_dim) // 8
    assert moved < 1.1 * (weights + decode.cache_bytes // 32)


@pytest.mark.parametrize("programs", ["eight_chips", "grouped_heads"])
def test_a_layer_of_decode_sums_over_the_chips_twice_and_sends_nothing_else(programs, request):
    decode = request.getfixturevalue(programs)["decode"]
    always = [instruction for instruction in decode.collectives() if not instruction.branches]
    # Inside the loop over steps, then the one over layers.
    assert Counter(found.collective for found in always if found.loops == 2) == {"all-reduce": 2}
    assert {found.bytes for found in always if found.loops == 2} == {8 * 4096 * 2}
    # A step: the tokens' embeddings, then a few numbers a row to draw over the split vocabulary; never the logits.
    a_step = sorted(found.bytes for found in always if found.loops < 2)
    assert a_step[-1] == 8 * 4096 * 2
    assert sum(a_step[:-1]) < 1024


def test_the_layers_of_decode_read_weights_and_cache_once(eight_chips):
    decode = eight_chips["decode"]
    inside = [found for found in decode.instructions() if found.loops == 2 and not found.branches]
    moved = sum((found.read_bytes + found.written_bytes) * found.runs for found in inside)
    weights = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) * 2 // 8
    assert 1 <= moved / (weights + decode.cache_bytes) < 1.1


def test_decode_compiles_in_ten_seconds():
    """Of this process, which others that run beside it do not lengthen."""
    began = time.process_time()
    compile_programs(LLAMA_2_7B, "v5e:2x4", batch=8, max_len=SLOTS, mesh=MeshConfig(tensor=8), prompt_tokens=None)
    assert time.process_time() - began < 10


def test_what_does_not_fit_is_refused_in_one_line():
    wide = dataclasses.replace(TINY, num_layers=1)
    with pytest.raises(InvalidOption, match=r"does not fit into the 15\.75 GiB of a v5e:1x1 device") as caught:
        compile_programs(wide, "v5e:1x1", batch=64, max_len=1 << 18, prompt_tokens=None)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, DoesNotFit)
    cache = 2 * 64 * (1 << 18) * 2 * 128 * 2
    assert caught.value.required_bytes == pytest.approx(cache, rel=0.05)


@pytest.mark.parametrize(
    ("topology", "options", "message"),
    [
        ("h100:8", {}, "unknown TPU topology 'h100:8'"),
        ("v5e:seven", {}, "no TPU topology 'v5e:seven'"),
        ("v5e:2x4", {}, "v5e:2x4 has 8 devices, but mesh tensor=1 is of 1: choose axes that multiply to 8"),
        ("v5e:2x4", {"mesh": MeshConfig(pipeline=8)}, "layers do not split evenly over pipeline=8 devices"),
        ("v5e:2x4", {"mesh": MeshConfig(data=8), "batch": 12}, "a batch of 12 does not split over data=8 devices"),
        ("v5e:1x1", {"prompt_tokens": 300}, "prompt_tokens=300 exceeds max_len=256"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_one_line(topology, options, message):
    with pytest.raises(InvalidOption, match=message) as caught:
        compile_programs(TINY, topology, **{"batch": 1, "max_len": 256, "prompt_tokens": 16, **options})
    assert "\n" not in str(caught.value)


def test_a_missing_libtpu_is_named_with_its_mend(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidOption, match=r'pip install "jaxinfer\[tpu\]"'):
        compile_programs(TINY, "v5e:1x1", batch=1, max_len=512)


def test_rows_over_data_and_heads_over_tensor_share_weights_and_cache_out_and_gather_neither():
    """Six heads on four devices are filled up to eight; what the two halves of the batch sum is a few numbers."""
    config = dataclasses.replace(TINY, num_heads=6, num_kv_heads=6)
    mesh = MeshConfig(data=2, tensor=4)
    decode = compile_programs(config, "v5e:2x4", batch=4, max_len=LONG, mesh=mesh, prompt_tokens=None)["decode"]
    assert decode.cache_bytes == 2 * 2 * (4 // 2) * LONG * (8 // 4) * 128 * 2
    assert decode.alias_bytes >= decode.cache_bytes
    assert _copies_of_the_cache(decode) == []
    always = [instruction for instruction in decode.collectives() if not instruction.branches]
    assert {found.collective for found in always} == {"all-reduce"}
    assert Counter(found.bytes for found in always if found.loops == 2) == {2 * 256 * 2: 2}
    assert all(found.bytes <= 2 * 256 * 2 for found in always)


def test_kernels_are_left_out_where_rows_alone_are_split():
    mesh = MeshConfig(data=8)
    decode = compile_programs(TINY, "v5e:2x4", batch=8, max_len=512, mesh=mesh, prompt_tokens=None)["decode"]
    assert all(found.bytes < 64 for found in decode.collectives() if not found.branches)
