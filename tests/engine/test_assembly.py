"""What an engine's programs are told of the devices that they run on."""

from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.engine.assembly import _beside_pages
from tests.toys import TINY_LLAMA, float32_backend


def test_rows_beside_pages_are_on_all_devices_of_a_group_and_so_are_those_of_drafters():
    backend, plain = float32_backend(), parse_strategy("prompt_lookup")
    assert backend.rows_over_experts
    drafter = DraftModel(model="name", config=TINY_LLAMA, backend=backend, params={"some": 1})
    whole = SumOfDrafters(parts=(drafter, plain))
    assert not _beside_pages(backend).rows_over_experts
    first, second = _beside_pages(whole).parts
    assert isinstance(first, DraftModel)
    assert first.backend is not None
    assert not first.backend.rows_over_experts
    assert (first.config, first.params) == (TINY_LLAMA, {"some": 1})
    assert second is plain is _beside_pages(plain)
