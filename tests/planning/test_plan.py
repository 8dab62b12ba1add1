"""Plans of published models, with the library's own programs compiled for TPUs that are not here."""

import dataclasses

import pytest

from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.footprint import count_footprint
from jaxinfer.planning.known_models import planned_config
from jaxinfer.planning.report import PlanReport, make_plan
from jaxinfer.planning.strategies import planned_strategy
from jaxinfer.planning.suggest import _on_meshes, find_alternatives, suggest_meshes
from tests.planning.models import EIGHT, LLAMA_2_7B

# Of these texts, which take 8 GiB each, one fits into a v5e chip.
LONG = Deployment(
    dataclasses.replace(
        LLAMA_2_7B, num_layers=64, model_dim=256, ffn_dim=512, num_heads=2, num_kv_heads=2, max_position=1 << 17
    ),
    "v5e:1x1",
    MeshConfig(),
    batch=2,
    max_len=1 << 17,
    prompt_tokens=16,
)
CHECKED_BY_COMPILING = pytest.mark.tpu_compile


@pytest.fixture(scope="module")
def refused() -> PlanReport:
    return make_plan(LONG)


def llama_3_70b(topology: str, tensor: int) -> Deployment:
    mesh = MeshConfig(tensor=tensor)
    return Deployment(planned_config("llama-3-70b"), topology, mesh, batch=8, max_len=8192, prompt_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "tensor"), [("v5e:4x8", 32), ("v6e:2x4", 8)])
def test_each_of_many_devices_holds_a_copy_of_a_key_head(topology, tensor):
    """On 32 devices each holds a copy of one of its eight key/value heads, with two of its eight queries."""
    found = count_footprint(llama_3_70b(topology, tensor))
    assert found.cache_bytes == 2 * 80 * 8 * 8208 * max(tensor, 8) * 128 * 2 // tensor


@CHECKED_BY_COMPILING
@pytest.mark.parametrize(
    ("topology", "tensor"),
    [
        pytest.param("v5e:4x8", 32, marks=pytest.mark.exhaustive),
        pytest.param("v6e:2x4", 8, marks=pytest.mark.exhaustive),
    ],
)
def test_a_mesh_for_llama_3_70b_is_found(topology, tensor):
    asked = llama_3_70b(topology, tensor)
    (found,) = suggest_meshes(asked, most=1)
    assert found.mesh == f"tensor={tensor}"
    assert found.hbm_total_bytes < asked.chip.device_hbm_bytes
    assert found.compile_seconds > 0


@pytest.mark.slow
@CHECKED_BY_COMPILING
def test_what_does_not_fit_is_estimated(refused):
    assert not refused.fits
    assert refused.cache_bytes == 2 * 64 * 2 * LONG.num_slots * 2 * 128 * 2
    assert refused.missing_bytes == refused.hbm_total_bytes - refused.hbm_capacity_bytes > 0
    assert {program.source for program in refused.programs.values()} == {"estimate"}
    assert refused.programs["decode"].hbm_bytes == refused.programs["decode"].floor_bytes


@CHECKED_BY_COMPILING
@pytest.mark.parametrize(
    "temporaries",
    [pytest.param(share, marks=pytest.mark.exhaustive) for share in (0.0, 0.02, 0.4)],
)
def test_what_fits_instead_is_the_most_that_does(refused, monkeypatch, temporaries):
    """The compiler's part is played by a sum in which temporaries are a share of the cache, rounded as it rounds."""

    def play(deployment: Deployment) -> PlanReport:
        footprint = count_footprint(deployment)
        needed = footprint.total_bytes + int(temporaries * footprint.cache_bytes)
        return dataclasses.replace(
            refused,
            topology=deployment.topology,
            mesh=str(deployment.mesh),
            batch=deployment.batch,
            max_len=deployment.max_len,
            fits=needed <= refused.hbm_capacity_bytes,
            hbm_total_bytes=int(round(needed / 2**30, 2) * 2**30),
        )

    monkeypatch.setattr("jaxinfer.planning.suggest.make_plan", play)
    asked = dataclasses.replace(LONG, batch=4, max_len=1 << 16)
    found = find_alternatives(asked, play(asked))
    assert found.largest_batch is not None
    assert found.longest_context is not None
    assert found.smallest_topology is not None
    batch, max_len = found.largest_batch.batch, found.longest_context.max_len
    assert (batch, found.largest_batch.max_len) == (3 if temporaries < 0.4 else 2, 1 << 16)
    assert play(dataclasses.replace(asked, max_len=max_len)).fits
    assert not play(dataclasses.replace(asked, max_len=int(1.02 * max_len))).fits
    assert found.smallest_topology.topology == "v5e:2x2"
    assert [mesh.mesh for mesh in suggest_meshes(dataclasses.replace(asked, batch=1, max_len=64))] == ["tensor=1"]


@CHECKED_BY_COMPILING
@pytest.mark.exhaustive
def test_what_fits_instead_is_compiled(refused):
    found = find_alternatives(LONG, refused)
    assert found.largest_batch is not None
    assert (found.largest_batch.batch, found.largest_batch.max_len) == (1, 1 << 17)
    assert found.longest_context is not None
    # One step more would not fit beside what the programs take besides.
    room = refused.hbm_capacity_bytes - refused.weights_bytes
    assert 0.9 < 2 * 64 * 2 * found.longest_context.max_len * 2 * 128 * 2 / room < 1
    assert found.smallest_topology is not None
    assert found.smallest_topology.topology == "v5e:2x2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "h100:8"}, "unknown TPU topology 'h100:8'"),
        ({"topology": "v5e:2by4"}, "no TPU topology 'v5e:2by4'"),
        ({"mesh": MeshConfig(data=2, tensor=2)}, "v5e:2x4 has 8 devices, but mesh data=2,tensor=2 is of 4"),
        ({"mesh": MeshConfig(data=8), "batch": 12}, "a batch of 12 does not split over data=8 devices"),
        (
            {"mesh": MeshConfig(pipeline=8), "config": dataclasses.replace(LLAMA_2_7B, num_layers=30)},
            "30 layers do not split evenly over pipeline=8 devices",
        ),
        ({"mesh": MeshConfig(pipeline=2, sequence=4)}, "pipeline=2 and sequence=4 do not go together"),
        ({"topology": "v5e:32x32"}, "write two sides of at most 16, as in v5e:2x4"),
        ({"topology": "v5e:2x2x2"}, "no TPU topology 'v5e:2x2x2'"),
        ({"topology": "v4:2x2"}, "write three sides of at most 28, as in v4:2x2x1"),
        ({"topology": "v5e:" + "9" * 5000 + "x1"}, "no TPU topology"),
        ({"max_len": 2049, "config": planned_config("opt-1.3b")}, "max_len=2049 exceeds the 2048 positions"),
        ({"prompt_tokens": 2048}, "prompt_tokens=2048 exceeds max_len=2046"),
        ({"prompt_tokens": 768}, "past 512 name a power of two"),
        ({"dtype": "float31"}, "unknown dtype 'float31'"),
        ({"exact": "nearly"}, "unknown exactness 'nearly'; use one of bits, margin"),
        ({"strategy_spec": "magic", "nodes": 0}, "unknown strategy 'magic'"),
        ({"strategy_spec": "mcts", "nodes": 0}, "tree search, which has a loop of its own, is not planned"),
        ({"strategy_spec": "beam", "nodes": 0}, "beam search, which has a loop of its own, is not planned"),
        ({"strategy_spec": "draft_model", "nodes": 0}, "name the draft model"),
        ({"strategy_spec": "draft_model:model=x,devices=1", "nodes": 0}, "plan .* the target with --nodes 6"),
        (
            {"strategy_spec": "draft_model:model=llama-3-8b", "nodes": 0},
            "llama-3-8b has 128256 tokens, the target 32000",
        ),
        ({"strategy_spec": "triforce:drafter=llama-3.2-1b", "nodes": 0}, "triforce: llama-3.2-1b has 128256 tokens"),
        ({"strategy_spec": "jacobi", "nodes": 4}, "give one of them"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_one_line(changes, message):
    with pytest.raises(InvalidOption, match=message) as caught:
        dataclasses.replace(EIGHT, **changes)
    assert "\n" not in str(caught.value)


def test_a_plan_of_fixed_rows_has_room_for_their_nodes_and_chunks():
    asked = dataclasses.replace(EIGHT, exact="bits", max_len=240)
    assert asked.split.backend.fixed_rows == 16
    assert (asked.num_slots, asked.padded_prompt_tokens) == (256, 256)
    assert dataclasses.replace(asked, max_len=2046).num_slots == 2064
    assert (EIGHT.num_slots, EIGHT.padded_prompt_tokens) == (2048, 16)


def test_a_dynamic_tree_is_planned_as_deep_as_published_trees():
    strategy = planned_strategy("medusa:tree=dynamic:64", LLAMA_2_7B, MeshConfig(), "bfloat16")
    assert (strategy.headroom, strategy.max_depth, strategy.branches) == (64, 4, True)


def test_a_bounded_sum_is_planned_with_the_drafts_that_it_asks_for():
    strategy = planned_strategy("medusa+prompt_lookup+nodes=8", LLAMA_2_7B, MeshConfig(), "bfloat16")
    assert isinstance(strategy, SumOfDrafters)
    assert [part.max_depth for part in strategy.parts] == [3, 7]
    assert [part.headroom for part in strategy.parts] == [10, 8]


def test_longer_texts_than_a_model_was_made_for_can_be_planned():
    """What they take does not depend on what the model learned; Llama 3 of 8,192 tokens has successors of more."""
    longer = dataclasses.replace(EIGHT, max_len=131072)
    assert longer.exceeds_context
    assert not EIGHT.exceeds_context


def test_meshes_that_split_slots_are_tried_where_the_deployment_does():
    split = dataclasses.replace(EIGHT, mesh=MeshConfig(sequence=2, tensor=4))
    meshes = {one.mesh for one in _on_meshes(split, split.topology)}
    assert {MeshConfig(sequence=2, tensor=4), MeshConfig(tensor=8), MeshConfig(data=2, sequence=2, tensor=2)} <= meshes
    assert not any(one.mesh.sequence > 1 for one in _on_meshes(EIGHT, EIGHT.topology))
