"""The library's own prefill and decode, compiled for TPUs that are not here."""

import dataclasses
from collections import Counter

import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.compile import CompiledProgram, DoesNotFit, compile_programs
from tests.planning.buffers import copies_of_the_cache, largest_buffers
from tests.planning.models import LLAMA_2_7B

pytestmark = pytest.mark.tpu_compile

SLOTS = 2048
LONG = 1 << 16  # a cache of so many slots does not go into vector memory
TINY = dataclasses.replace(LLAMA_2_7B, num_layers=2, model_dim=256, ffn_dim=512, num_heads=2, num_kv_heads=2)


@pytest.fixture(scope="module")
def one_chip() -> dict[str, CompiledProgram]:
    return compile_programs(LLAMA_2_7B, "v5e:1x1", batch=1, max_len=SLOTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_llama_2_7b_fits_one_chip_of_16_gib_and_writes_its_cache_in_place(one_chip, name):
    program = one_chip[name]
    assert program.cache_bytes == 2 * 32 * SLOTS * 4096 * 2
    assert program.argument_bytes + program.temporary_bytes <= 15.75 * 2**30
    assert program.peak_bytes <= 15.75 * 2**30
    assert program.alias_bytes >= program.cache_bytes
    assert program.total_bytes - program.argument_bytes - program.temporary_bytes < 4096
    assert copies_of_the_cache(program) == [], largest_buffers(program.hlo)


@pytest.mark.exhaustive
def test_decode_on_one_chip_communicates_with_none(one_chip):
    assert one_chip["decode"].collectives() == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_rows_over_data_and_heads_over_tensor_share_weights_and_cache_out_and_gather_neither():
    """Six heads on four devices are filled up to eight; what the two halves of the batch sum is a few numbers."""
    config = dataclasses.replace(TINY, num_heads=6, num_kv_heads=6)
    mesh = MeshConfig(data=2, tensor=4)
    decode = compile_programs(config, "v5e:2x4", batch=4, max_len=LONG, mesh=mesh, prompt_tokens=None)["decode"]
    assert decode.cache_bytes == 2 * 2 * (4 // 2) * LONG * (8 // 4) * 128 * 2
    assert decode.alias_bytes >= decode.cache_bytes
    assert copies_of_the_cache(decode) == [], largest_buffers(decode.hlo)
    always = [instruction for instruction in decode.collectives() if not instruction.branches]
    assert {found.collective for found in always} == {"all-reduce"}
    assert Counter(found.bytes for found in always if found.loops == 2) == {2 * 256 * 2: 2}
    assert all(found.bytes <= 2 * 256 * 2 for found in always)


@pytest.mark.exhaustive
def test_kernels_are_left_out_where_rows_alone_are_split():
    mesh = MeshConfig(data=8)
    decode = compile_programs(TINY, "v5e:2x4", batch=8, max_len=512, mesh=mesh, prompt_tokens=None)["decode"]
    assert all(found.bytes < 64 for found in decode.collectives() if not found.branches)
