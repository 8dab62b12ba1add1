"""How layers are split into stages, and batches into microbatches."""

from dataclasses import replace

import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.models.stages import Schedule, check_stages, num_stages, plan_schedule
from tests.toys import TINY_LLAMA

NEAR, FAR = LayerKind(Rope(1e4, 8), window=16), LayerKind(Rope(1e4, 8))
ALTERNATING = replace(TINY_LLAMA, num_layers=12, layer_pattern=(NEAR, NEAR, FAR))


def test_stages_have_whole_cycles():
    assert [num_stages(ALTERNATING, count) for count in (1, 2, 3, 4, 6)] == [1, 2, 1, 4, 1]
    assert num_stages(replace(TINY_LLAMA, num_layers=6), 3) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10, "layer_pattern": (FAR,)}, "10 layers do not split evenly over pipeline=3 devices: "),
        ({}, "12 layers, 4 cycles of 3 kinds, do not split evenly over pipeline=3 devices: choose a divisor of 4$"),
        ({"num_layers": 13}, "13 layers, which are not one cycle of kinds that repeats, do not split over pipeline=3"),
    ],
)
def test_layers_that_do_not_divide_are_named(changes, message):
    with pytest.raises(InvalidOption, match=message) as caught:
        check_stages(replace(ALTERNATING, **changes), 3)
    assert "\n" not in str(caught.value)


def test_the_bubble_is_what_a_stage_waits():
    assert (Schedule(4, 1).bubble, Schedule(4, 9).bubble, Schedule(1, 5).bubble) == (3 / 4, 3 / 12, 0)
    assert Schedule(4, 9).ticks == 12


def test_few_rows_are_one_microbatch_since_each_reads_the_weights():
    assert plan_schedule(4, rows=8, tokens=1, weight_bytes=1000, cache_bytes=500).microbatches == 1


def test_large_caches_and_many_tokens_are_cut():
    assert plan_schedule(4, rows=8, tokens=1, weight_bytes=10, cache_bytes=1000).microbatches == 8
    assert plan_schedule(4, rows=8, tokens=512, weight_bytes=1000, cache_bytes=10).microbatches == 8


def test_no_more_than_asked_for_and_only_what_divides():
    asked = {"tokens": 1, "weight_bytes": 1, "cache_bytes": 1}
    assert [plan_schedule(2, rows=12, most=most, **asked).microbatches for most in (1, 5, 6, 99)] == [1, 4, 6, 12]
