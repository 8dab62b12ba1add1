"""What speculation must gain for what it costs."""

import pytest

from jaxinfer.planning.cost_model import acceptance_needed


def test_one_draft_must_be_accepted_as_often_as_it_costs_more():
    assert acceptance_needed(1.25, 1) == pytest.approx(0.25, abs=1e-5)


def test_chains_of_drafts_share_their_cost():
    """1 + a + a^2 = 1.75 has the root a = 1/2."""
    assert acceptance_needed(1.75, 2) == pytest.approx(0.5, abs=1e-5)
    assert acceptance_needed(1.25, 7) == pytest.approx(0.2, abs=1e-4)


def test_what_costs_nothing_needs_nothing_and_what_costs_too_much_never_pays():
    assert acceptance_needed(0.98, 4) == 0.0
    assert acceptance_needed(5.0, 4) == pytest.approx(1.0, abs=1e-5)
    assert acceptance_needed(5.01, 4) is None
