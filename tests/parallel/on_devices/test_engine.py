"""An engine on a mesh gives every request what plain decoding gives it there alone, whatever else runs."""

from dataclasses import replace

import jax
import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.groups import held_by, own_groups
from tests.decoding.covered_models import LIMITS, SAMPLINGS, Covered, ask, random_prompts
from tests.decoding.strategy_cases import CASES
from tests.engine.harness import SMALL, Harness
from tests.engine.test_beams import Searched, beam_harness, check
from tests.engine.test_law import check_pattern
from tests.parallel.on_devices.meshes import make_model, on_mesh


@pytest.mark.parametrize(
    ("mesh", "model", "name"),
    [
        pytest.param("data=2,tensor=2", "llama", "prompt_lookup", marks=pytest.mark.slow),
        pytest.param("data=2,tensor=2", "gemma2", "prompt_lookup", marks=pytest.mark.exhaustive),
        pytest.param("tensor=2", "gemma2", "draft_model", marks=pytest.mark.exhaustive),
        pytest.param("data=2", "gemma2", "medusa", marks=pytest.mark.exhaustive),
        pytest.param("expert=2,tensor=2", "qwen2_moe", "prompt_lookup", marks=pytest.mark.exhaustive),
    ],
)
def test_load_shared_pages_and_making_room_change_no_bit(mesh, model, name):
    """The same texts come twice, when each row has another's pages; the pages are those of little more than one."""
    one = make_model(model, dtype="bfloat16")
    lm = on_mesh(one, mesh)
    some = slice(0, 4, 2)
    asked = ask(lm, random_prompts()[some], LIMITS[some], SAMPLINGS[some])
    strategy = lm.resolve(CASES[name].strategy(model, one, asked.texts))
    pages = -(-(max(request.max_length for request in asked.requests) + strategy.headroom) // SMALL.page_size)
    harness = Harness(lm, strategy, replace(SMALL, max_rows=2, pages=pages + 2))
    arrivals = [(0, 0, 0, None, ""), (0, 1, 0, None, ""), (1, 1, 0, None, ""), (9, 0, 0, None, "")]
    for preemption in ("offload", "recompute"):
        seen = check_pattern(Covered(lm, asked, asked), harness, (arrivals, preemption, "exact"))
        assert seen["preempted"] > 0
        assert seen["cached"] > 0
        assert seen["accepted"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "tensor=2"])
def test_searches_find_what_they_find_in_a_batch_on_the_mesh(mesh):
    searched = Searched(on_mesh(make_model("gemma2"), mesh), [prompt[:20] for prompt in random_prompts()[:4]], 20)
    # As many pages as the longest search may need alone.
    size, asked = SMALL.page_size, searched.requests
    pages = max(-(-(each.max_length + 1) // size) * 3 - len(each.prompt) // size * 2 for each in asked)
    harness = beam_harness(searched, replace(SMALL, max_rows=7, pages=pages))
    for preemption in ("offload", "recompute"):
        before = harness.scheduler.preemptions
        check(searched, harness, [(0, which) for which in (3, 0, 1, 2, 3)], preemption=preemption)
        assert harness.scheduler.preemptions > before


@pytest.mark.exhaustive
def test_users_get_an_engine_whose_groups_have_their_own_pages():
    one = make_model("gemma2")
    lm, prompts = on_mesh(one, "data=2"), random_prompts()[:4]
    expected = [one.generate([prompt], max_new_tokens=5)[0].tokens for prompt in prompts]
    with lm.engine(max_rows=4, page_size=16, pages=40) as engine:
        requests = [engine.submit(prompt, max_new_tokens=5) for prompt in prompts]
        assert [request.result().tokens for request in requests] == expected
        cores = [group.core for group in engine._groups]
        assert [core.metrics().finished for core in cores] == [2, 2]
        pools = [jax.tree.leaves(core._device._pools)[0] for core in cores]
        assert [pool.shape[1] for pool in pools] == [21, 21]
        assert [pool.sharding.device_set for pool in pools] == [{device} for device in jax.devices()[:2]]


def test_a_group_has_the_parameters_where_they_lie():
    lm = on_mesh(make_model("gemma2"), "data=2,tensor=2")
    for place, on in enumerate(own_groups(lm.programs.partitioner)):
        devices = jax.devices()[2 * place : 2 * place + 2]
        assert dict(on.mesh.shape) == {**lm.programs.partitioner.mesh.shape, "data": 1}
        for whole, held in zip(jax.tree.leaves(lm.params), jax.tree.leaves(held_by(on, lm.params)), strict=True):
            assert held.shape == whole.shape
            there = {part.device: part.data.unsafe_buffer_pointer() for part in whole.addressable_shards}
            found = {part.device: part.data.unsafe_buffer_pointer() for part in held.addressable_shards}
            assert found == {device: there[device] for device in devices}


def test_other_axes_are_refused_in_one_line():
    with pytest.raises(InvalidOption, match=r"splits over data, expert and tensor alone, not sequence=2$"):
        on_mesh(make_model("gemma2"), "sequence=2").engine()
