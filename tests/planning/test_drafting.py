"""A plan says what `auto` would do on a TPU: by its own rule, from counted costs, with the nodes that it has there."""

import dataclasses

import pytest

from jaxinfer.cli.output.plan_table import drafting_lines
from jaxinfer.decoding.strategies.auto import Auto
from jaxinfer.decoding.strategy import Target
from jaxinfer.engine.device import by_nodes
from jaxinfer.ops.backend import choose_backend
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.drafting import Drafting, plan_drafting
from tests.planning.models import LLAMA_3_8B

AUTO = Deployment(LLAMA_3_8B, "v5e:2x2", MeshConfig(tensor=4), 1, 2048, 512, strategy_spec="auto")


@pytest.fixture(scope="module")
def planned() -> list[Drafting]:
    return plan_drafting(AUTO)


def test_few_texts_are_drafted_widely_and_many_with_fewer_nodes(planned):
    """A v5e multiplies 240 rows while a weight arrives: 32 nodes of 8 texts, but 4 of 64."""
    one, eight, many = planned
    assert [each.batch for each in planned] == [1, 8, 64]
    assert [list(each.costs) for each in planned] == [[1, 4, 8, 16, 32]] * 3
    assert (one.nodes, eight.nodes, many.nodes) == (32, 32, 8)
    assert max(one.costs.values()) < 1.02
    assert max(eight.costs.values()) < 1.1
    assert many.costs[4] < 1.02 < many.costs[8] < 1.57 < many.costs[16] < many.costs[32]
    for each in planned:
        assert each.tokens_per_step / each.costs[each.nodes] == pytest.approx(
            max(gain / each.costs[nodes] for nodes, gain in ((1, 1), (4, 1.456), (8, 1.57), (16, 1.684), (32, 1.798))),
            rel=0.01,
        )


@pytest.mark.exhaustive
def test_a_batch_that_does_not_split_or_fit_has_no_choice():
    split = dataclasses.replace(AUTO, mesh=MeshConfig(data=4), batch=4)
    assert [each.nodes for each in plan_drafting(split)] == [None, 32, None]


def test_a_line_tells_a_choice_or_that_there_is_none(planned):
    lines = drafting_lines("auto", [planned[2], Drafting(64, {}, 0.0, None, 1.0)])
    assert "batch 64: 4: 1.00, 8: 1.05" in lines[1]
    assert "verifies 8 nodes, 1.57 tokens a step" in lines[1]
    assert lines[2].strip() == "batch 64: does not fit, or does not split over the devices"


@pytest.mark.parametrize(("platform", "nodes"), [("tpu", [1, 4, 8, 16, 32]), ("cpu", [1, 4, 8])])
def test_an_engine_has_the_nodes_that_the_plan_speaks_of(platform, nodes):
    backend = choose_backend("bfloat16", platform=platform)
    bounded = Auto().bounded_for(Target(LLAMA_3_8B, backend, {}))
    assert list(by_nodes(bounded, backend)) == nodes
