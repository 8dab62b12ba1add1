"""What collectives send."""

import pytest

from jaxinfer.planning.hlo.collectives import buffer_bytes, group_size, num_partitions, sent_bytes
from jaxinfer.planning.hlo.text import read_line
from jaxinfer.planning.hlo.walk import total, walk

ALL = 8


def line(opcode: str, result: str = "bf16[4,128]{1,0}", groups: str = "[2,4]<=[8]", operands: str = "%x"):
    found = read_line(f"  %c = {result} {opcode}({operands}), channel_id=3, replica_groups={groups}, to_apply=%add")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,2,2]T(1,0,2)", 2),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}", 4),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", 4),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1','axis_2'}", 4),
        ("{}", ALL),
    ],
)
def test_a_group_is_listed_counted_or_named(groups, devices):
    assert group_size(line("all-reduce", groups=groups), ALL) == devices


def test_each_of_four_devices_sends_what_a_ring_of_them_does():
    size = 4 * 128 * 2
    whole = {
        "all-reduce": 2 * size * 3 // 4,
        "all-gather": size * 3 // 4,
        "all-to-all": size * 3 // 4,
        "reduce-scatter": size * 3,  # the result is one of the four parts
        "collective-permute": size,
        "add": 0,
    }
    assert {kind: sent_bytes(line(kind), ALL) for kind in whole} == whole


def test_several_arrays_in_one_sum_are_all_sent_and_those_of_a_start_once():
    pair = "(bf16[4,128]{1,0}, f32[4,128]{1,0})"
    assert sent_bytes(line("all-reduce", pair), ALL) == 2 * 4 * 128 * (2 + 4) * 3 // 4
    started = "(bf16[4,32]{1,0}, bf16[4,128]{1,0}, u32[]{:S(2)})"
    assert sent_bytes(line("all-gather-start", started), ALL) == 4 * 128 * 2 * 3 // 4
    both = "((bf16[4,32]{1,0}, f32[4,32]{1,0}), (bf16[4,128]{1,0}, f32[4,128]{1,0}))"
    assert sent_bytes(line("all-gather-start", both, operands="%x, %y"), ALL) == 4 * 128 * (2 + 4) * 3 // 4
    start = line("all-reduce-start", pair, operands="%x, %y")
    assert sent_bytes(start, ALL) == 2 * 4 * 128 * (2 + 4) * 3 // 4
    assert buffer_bytes(start) == buffer_bytes(line("all-reduce", pair)) == 4 * 128 * (2 + 4)


def test_a_program_says_on_how_many_devices_it_runs():
    assert num_partitions("HloModule jit_f, is_scheduled=true, num_partitions=32, replica_count=1\n...") == 32
    assert num_partitions("HloModule jit_f\nnum_partitions=2") == 1


def test_a_sum_of_which_each_device_keeps_a_part_is_a_reduce_scatter():
    hlo = """HloModule jit_f, is_scheduled=true, num_partitions=4

%all-reduce-scatter.1 (input: f32[64,128]) -> f32[16,128] {
  %input = f32[64,128]{1,0} parameter(0)
  %sum = f32[64,128]{1,0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[16,128]{1,0} slice(%sum), slice={[0:16], [0:128]}
}

ENTRY %main (x: f32[64,128]) -> f32[16,128] {
  %x = f32[64,128]{1,0} parameter(0)
  ROOT %fusion = f32[16,128]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    (found,) = (found for found in walk(hlo) if found.collective)
    assert (found.collective, found.bytes, found.sent_bytes) == ("reduce-scatter", 16 * 128 * 4, 3 * 16 * 128 * 4)
    assert found.group == 4


def test_a_gather_that_goes_on_beside_products_is_one():
    """Fusions that go on with a collective, or end it, name it again."""
    hlo = """HloModule jit_f, is_scheduled=true, num_partitions=4

%begin (input: f32[16,128]) -> (f32[64,128], u32[]) {
  %input = f32[16,128]{1,0} parameter(0)
  %gather.1 = f32[64,128]{1,0} all-gather(%input), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %call = (f32[64,128]{1,0}, u32[]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%end (input.2: f32[16,128]) -> f32[64,128] {
  %input.2 = f32[16,128]{1,0} parameter(0)
  %gather.2 = f32[64,128]{1,0} all-gather(%input.2), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %call.2 = f32[64,128]{1,0} custom-call(%gather.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[16,128]) -> f32[64,128] {
  %x = f32[16,128]{1,0} parameter(0)
  %other = f32[64,128]{1,0} all-gather(%x), channel_id=8, replica_groups={{0,1,2,3}}, dimensions={0}
  %start = (f32[64,128]{1,0}, u32[]) fusion(%x), kind=kCustom, calls=%begin
  ROOT %done = f32[64,128]{1,0} fusion(%x), kind=kCustom, calls=%end
}
"""
    assert total(walk(hlo)).collectives == {"all-gather": (2, 2 * 64 * 128 * 4)}


def test_of_a_ragged_exchange_rows_count_that_there_are():
    """One side has room for all rows of all devices; they are sent, read and written as far as they are filled."""
    hlo = """HloModule jit_f, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[16,128], room: f32[64,128], n: s32[4]) -> f32[16,128] {
  %x = f32[16,128]{1,0} parameter(0)
  %room = f32[64,128]{1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  %there = f32[64,128]{1,0} ragged-all-to-all(%x, %room, %n, %n, %n, /*index=5*/%n), channel_id=1, replica_groups={{0,1,2,3}}
  ROOT %back = f32[16,128]{1,0} ragged-all-to-all(%there, %x, %n, %n, %n, /*index=5*/%n), channel_id=2, replica_groups={{0,1,2,3}}
}
"""  # noqa: E501
    size = 16 * 128 * 4
    for found in (found for found in walk(hlo) if found.collective):
        assert (found.collective, found.sent_bytes) == ("ragged-all-to-all", size * 3 // 4)
        assert (found.read_bytes, found.written_bytes) == (size, size)
    assert total(walk(hlo)).collectives == {"ragged-all-to-all": (2, 2 * size)}
