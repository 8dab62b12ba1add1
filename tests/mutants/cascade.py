"""Faults of a cascade: who goes on from where, how far, with which weights, and in how much room."""

from tests.mutants.fault import Fault

_CASCADE, _OF_CASCADE = "jaxinfer/decoding/strategies/cascade.py", "tests/decoding/strategies/test_cascade.py::"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "heads of a cascade go on from the last draft, taken or not",
        _CASCADE,
        "CascadeMemory(self.drafter.resumed(memory.of_drafter, verified.last), lengths)",
        "CascadeMemory(memory.of_drafter, lengths)",
        f"{_OF_CASCADE}test_heads_go_on_from_what_the_model_has_taken",
    ),
    Fault(
        "a sum that others have carried on tells none of its drafters",
        "jaxinfer/decoding/strategies/sum_of_drafters.py",
        "part.resumed(each, last)",
        "each",
        f"{_OF_CASCADE}test_heads_go_on_from_what_the_model_has_taken",
    ),
    Fault(
        "a cascade leaves no room for what drafts for the weights in fewer bits",
        _CASCADE,
        "return self.num_draft_tokens + self.drafter.headroom",
        "return self.num_draft_tokens + 1",
        f"{_OF_CASCADE}test_a_step_has_room_for_the_tree_that_follows_the_last_draft_but_one",
    ),
    Fault(
        "a cascade drafts one token less than it may",
        _CASCADE,
        "speculate(ahead, *begun, memory.lengths.counts_B)",
        "speculate(ahead, *begun, memory.lengths.counts_B - 1)",
        f"{_OF_CASCADE}test_weights_that_are_the_models_are_taken_whole",
    ),
    Fault(
        "the model in fewer bits has the model's own weights",
        "jaxinfer/decoding/drafting/loaded_model.py",
        "        params = in_few_bits(params, form, named, only_experts=few_bits.only_experts)\n",
        "",
        f"{_OF_CASCADE}test_the_weights_are_rounded_and_change_no_token",
    ),
    Fault(
        "a cascade drafts as far as ever, whatever was taken",
        _CASCADE,
        'next_lengths("heuristic", memory',
        'next_lengths("constant", memory',
        f"{_OF_CASCADE}test_a_draft_is_as_long_as_drafts_have_been_right",
    ),
    Fault(
        "a cascade's drafting costs nothing where a bench foretells its speed",
        "jaxinfer/planning/cost_model.py",
        "isinstance(part, DraftModel | Cascade)",
        "isinstance(part, DraftModel)",
        "tests/bench/test_acceptance.py::test_steps_and_drafters_are_measured_on_this_device",
    ),
    Fault(
        "nobody counts the steps of a model that decodes ahead",
        _CASCADE,
        "steps_ahead=future.steps_B - state.steps_B",
        "steps_ahead=0 * state.steps_B",
        f"{_OF_CASCADE}test_steps_ahead_are_counted",
    ),
)
