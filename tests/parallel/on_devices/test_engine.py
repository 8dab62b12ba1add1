"""An engine on a mesh gives every request what plain decoding gives it there alone, whatever else runs."""

from dataclasses import replace

import pytest

from jaxinfer.errors import InvalidOption
from tests.decoding.covered_models import LIMITS, SAMPLINGS, Covered, ask, random_prompts
from tests.decoding.strategy_cases import CASES
from tests.engine.harness import SMALL, Harness
from tests.engine.test_beams import Searched, beam_harness, check
from tests.engine.test_law import check_pattern
from tests.parallel.on_devices.meshes import make_model, on_mesh


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        pytest.param("data=2,tensor=2", "prompt_lookup", marks=pytest.mark.slow),
        pytest.param("tensor=2", "draft_model", marks=pytest.mark.exhaustive),
        pytest.param("data=2", "medusa", marks=pytest.mark.exhaustive),
    ],
)
def test_load_shared_pages_and_making_room_change_no_bit(mesh, name):
    """The same texts come twice, when each row has another's pages; the pages are those of little more than one."""
    one = make_model("gemma2", dtype="bfloat16")
    lm = on_mesh(one, mesh)
    some = slice(0, 4, 2)
    asked = ask(lm, random_prompts()[some], LIMITS[some], SAMPLINGS[some])
    strategy = lm.resolve(CASES[name].strategy("gemma2", one, asked.texts))
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


@pytest.mark.slow
def test_users_get_an_engine_on_a_mesh_of_heads_and_rows_alone():
    one = make_model("gemma2")
    lm = on_mesh(one, "data=2,tensor=2")
    prompt = random_prompts()[1]
    with lm.engine(max_rows=2, page_size=16) as engine:
        found = engine.submit(prompt, max_new_tokens=5).result()
    assert found.tokens == lm.generate([prompt], max_new_tokens=5)[0].tokens


def test_other_axes_are_refused_in_one_line():
    with pytest.raises(InvalidOption, match=r"splits over data and tensor alone, not sequence=2$"):
        on_mesh(make_model("gemma2"), "sequence=2").engine()
