"""The latency of collectives: how many links they cross, one after the other, counted by hand."""

import pytest

from jaxinfer.planning.latency import count_hops, farthest, hops_of


@pytest.mark.parametrize(
    ("topology", "devices", "links"),
    [
        ("v5e:1x1", 1, 1),
        ("v5e:2x4", 2, 1),
        ("v5e:2x4", 4, 2),  # a square
        ("v5e:2x4", 8, 4),
        ("v5e:4x4", 8, 4),
        ("v5e:4x4", 16, 6),
        ("v5e:8x16", 128, 7 + 8),  # the long side is a ring, the short one is not
        ("v6e:16x16", 256, 8 + 8),
        ("v5p:2x2x1", 4, 2),
        ("v5p:2x2x4", 16, 1 + 1 + 3),  # not a whole cube: no rings
        ("v4:4x4x4", 64, 2 + 2 + 2),
        ("v4:4x4x4", 8, 1 + 1 + 1),
        ("tpu7x:2x2x1", 2, 1),  # both on one chip
        ("tpu7x:2x2x1", 8, 2),
    ],
)
def test_the_farthest_devices_are_as_many_links_apart_as_counted_by_hand(topology, devices, links):
    assert farthest(devices, topology) == links


def test_a_sum_crosses_its_links_twice_and_a_step_to_the_next_stage_one():
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-broadcast", "collective-permute")
    assert [hops_of(kind, 8, "v5e:2x4") for kind in kinds] == [8, 4, 4, 4, 4, 1]
    assert all(hops_of(kind, 1, "v5e:2x4") == 0 for kind in kinds)


def test_collectives_wait_one_after_the_other():
    groups = {("all-reduce", 8): 65, ("all-gather", 2): 3, ("collective-permute", 8): 4}
    assert count_hops(groups, "v5e:2x4") == 65 * 8 + 3 * 1 + 4
