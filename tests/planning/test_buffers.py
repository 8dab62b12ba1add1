"""What a failing test of memory says names the buffers that take it."""

from tests.planning.buffers import largest_buffers

TEXT = """HloModule step

%fused (a: bf16[2,4096,4096]) -> bf16[2,4096,4096] {
  %a = bf16[2,4096,4096]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %inner = bf16[2,4096,4096]{2,1,0:T(8,128)(2,1)} negate(%a)
}

ENTRY %main (cache: bf16[2,4096,4096], x: f32[8,16]) -> bf16[2,4096,4096] {
  %cache = bf16[2,4096,4096]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x = f32[8,16]{1,0:T(8,128)} parameter(1)
  %copy.7 = bf16[2,4096,4096]{1,2,0:T(8,128)(2,1)} copy(%cache), metadata={op_name="jit(decode)/while/body/keep"}
  %small = f32[8,16]{1,0:T(8,128)} add(%x, %x)
  ROOT %turned = bf16[2,4096,4096]{2,1,0:T(8,128)(2,1)} fusion(%copy.7), kind=kLoop, calls=%fused
}
"""


def test_the_copy_of_a_cache_is_named_with_where_it_comes_from():
    lines = largest_buffers(TEXT, count=2).splitlines()
    size = 2 * 4096 * 4096 * 2
    assert [line.split()[:3] for line in lines] == [[f"{size:,}", "bytes", name] for name in ("%copy.7", "%turned")]
    assert lines[0].endswith("copy  of jit(decode)/while/body/keep")
    assert lines[1].endswith("fusion")


def test_all_that_is_stored_is_listed_and_nothing_else():
    assert [line.split()[2] for line in largest_buffers(TEXT).splitlines()] == ["%copy.7", "%turned", "%small"]
