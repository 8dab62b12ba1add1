"""What a processor has: the instructions that XLA's flag leaves it, and numbers picked out of a table."""

import ctypes

import numpy as np
import pytest
from llvmlite import binding as llvm

from jaxinfer.ops.cpu_kernels import machine_code
from jaxinfer.ops.cpu_kernels.assembly import Code
from jaxinfer.ops.cpu_kernels.lookups import declared_lookup, look_up
from jaxinfer.ops.cpu_kernels.processor import host_features, left_out
from jaxinfer.ops.cpu_kernels.tiles import describe_vectors
from jaxinfer.ops.few_bits.formats import nf4
from tests.ops.foreign_calls import HOST
from tests.ops.test_cpu_kernels import AVX2, AVX512, machine_of, parsed

X86 = "x86_64-unknown-linux-gnu"
# Of the widest x86 processors, and another make's.
ALL = (
    *("sse4.2", "avx", "f16c", "fma", "avx2", "avxvnni", "avx512f", "avx512vbmi2", "avx512vnni", "avx512bf16"),
    *("amx-tile", "amx-bf16", "amx-fp16"),
)


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        ("SSE4_2", {"sse4.2"}),
        ("avx", {"sse4.2", "avx", "f16c", "avxvnni"}),
        ("AVX2", {"sse4.2", "avx", "f16c", "fma", "avx2", "avxvnni"}),
        ("AVX512_VNNI", set(ALL) - {"avx512bf16", "amx-tile", "amx-bf16", "amx-fp16"}),
        ("AMX", set(ALL) - {"amx-fp16"}),
        ("", set(ALL)),
        ("NEOVERSE_V1", set(ALL)),
    ],
)
def test_a_limit_leaves_out_what_is_above_it(limit, kept):
    assert set(ALL) - set(left_out(limit, dict.fromkeys(ALL, True))) == kept


def test_our_code_keeps_to_the_instructions_that_xla_may_use(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    found = host_features()
    assert found == llvm.get_host_cpu_features()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX512 --xla_dump_to=/nowhere --xla_cpu_max_isa=SSE4_2")
    assert {name for name, has in found.items() if has and not host_features()[name]} == {
        name for name in left_out("SSE4_2", found) if found[name]
    }
    if llvm.get_process_triple().startswith("x86"):
        machine_code.host_vectors.cache_clear()
        try:
            assert machine_code.host_vectors().lanes == 4
        finally:
            machine_code.host_vectors.cache_clear()


def lookup(picks_by, table, lanes):
    """Return a module whose ``handler(places, found)`` looks ``lanes`` numbers up."""
    code = Code("void @handler(ptr %places, ptr %found)")
    places = code.load(f"<{lanes} x i32>", "%places", 4)
    code.effect(f"store <{lanes} x float> {look_up(code, picks_by, table, places, lanes)}, ptr %found, align 4")
    code.effect("ret void")
    return declared_lookup(picks_by) + code.text()


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("numbers", [16, 32, 64])
def test_numbers_are_those_at_their_places(lanes, numbers):
    rng = np.random.default_rng(lanes * numbers)
    table = rng.standard_normal(numbers).astype(np.float32)
    for picks_by in {HOST.picks_by, "avx2" if HOST.picks_by == "avx512" else HOST.picks_by} - {""}:
        machine = machine_code._machine()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(lookup(picks_by, table.tolist(), lanes)), machine)
        engine.finalize_object()
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address("handler"))
        for _ in range(20):
            # Any bits above a place.
            places = rng.integers(0, 2**32, lanes, np.uint32)
            found = np.empty(lanes, np.float32)
            call(places.ctypes.data, found.ctypes.data)
            np.testing.assert_array_equal(found, table[places % numbers])


@pytest.mark.parametrize(
    ("triple", "processor", "features", "instruction"),
    [
        ("aarch64-unknown-linux-gnu", "neoverse-n1", {}, "tbl"),
        (X86, "haswell", AVX2, "vperm"),
        (X86, "skylake-avx512", AVX512, "vperm"),
    ],
)
def test_a_lookup_is_an_instruction(triple, processor, features, instruction):
    vectors, machine = describe_vectors(triple, features), machine_of(triple, processor, features)
    assembly = machine.emit_assembly(parsed(lookup(vectors.picks_by, nf4(64).levels, 16), triple))
    # Two parts of a table where a vector has eight numbers.
    assert assembly.count(f"\t{instruction}") == {16: 1, 8: 4, 4: 4}[vectors.lanes]
