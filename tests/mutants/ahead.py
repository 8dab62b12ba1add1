"""Faults of drafting while the target verifies."""

from tests.mutants.fault import Fault

_STEP = "jaxinfer/decoding/ahead/step.py"
_CHAINS = "tests/decoding/drafting/test_ahead.py::test_chains_are_those_of_the_text_whether_made_ahead_or_not"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "drafts made ahead are used as soon as one row went that way",
        _STEP,
        "is_right = (as_expected_B | state.finished_B).all()",
        "is_right = (as_expected_B | state.finished_B).any()",
        _CHAINS,
    ),
    Fault(
        "drafts made ahead are used whatever token the target added",
        _STEP,
        "(state.lengths_B == ahead.length_B + count + 1) & (tokens_BM == ahead.expected_BM).all(axis=1)",
        "state.lengths_B == ahead.length_B + count + 1",
        _CHAINS,
    ),
    Fault(
        "drafts made ahead begin before the token that the target adds",
        _STEP,
        "next_one = Chain(further.tokens_BM[:, 1:], further.drafted_BM[:, 1:])",
        "next_one = Chain(further.tokens_BM[:, :-1], further.drafted_BM[:, :-1])",
        _CHAINS,
    ),
    Fault(
        "a sum takes a draft model on devices of its own",
        "jaxinfer/decoding/strategies/sum_of_drafters.py",
        "            if part.drafts_elsewhere:\n",
        "            if False:\n",
        "tests/decoding/drafting/test_ahead.py::test_what_does_not_go_with_devices_is_refused_in_a_line"
        "[model=x,devices=1+prompt_lookup-devices= drafts alone]",
    ),
)
