"""Faults of `auto`: what it drafts with, when it drafts, and what it keeps of what steps cost."""

from tests.mutants.fault import Fault

_PACE, _KEPT = "jaxinfer/engine/pace.py", "jaxinfer/engine/kept_pace.py"
_AUTO, _OF_PACE = "jaxinfer/decoding/strategies/auto.py", "tests/engine/test_pace.py::"
_TESTS = "tests/decoding/strategies/test_auto.py::"
_KNOWN = f"{_TESTS}test_what_steps_cost_is_known_from_the_last_process"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "auto verifies as many nodes of many texts as of one where rows are free",
        "jaxinfer/engine/device.py",
        "(strategy.adapts or not backend.has_free_rows)",
        "(not backend.has_free_rows)",
        "tests/planning/test_drafting.py::test_an_engine_has_the_nodes_that_the_plan_speaks_of[tpu-nodes0]",
    ),
    Fault(
        "a plan of auto has the costs of one batch for all",
        "jaxinfer/planning/drafting.py",
        "replace(deployment, batch=batch)",
        "replace(deployment, batch=1)",
        "tests/planning/test_drafting.py::test_few_texts_are_drafted_widely_and_many_with_fewer_nodes",
    ),
    Fault(
        "auto drafts without the heads that come for the weights",
        "jaxinfer/decoding/strategies/at_hand.py",
        "if is_shipped(",
        "if not is_shipped(",
        f"{_TESTS}test_it_drafts_with_the_heads_that_come_for_the_weights",
    ),
    Fault(
        "auto drafts always",
        "jaxinfer/engine/serve_all.py",
        '"auto" if strategy.adapts else "always"',
        '"always"',
        _KNOWN,
    ),
    Fault(
        "auto streams without an engine",
        "jaxinfer/language_model.py",
        "reuse or resolved.adapts",
        "reuse",
        _KNOWN,
    ),
    Fault(
        "what steps cost is not written down",
        _KEPT,
        "if folder is None or len(content) <= len(before):",
        "if folder is None or len(content) > len(before):",
        _KNOWN,
    ),
    Fault(
        "costs that are known are tried again",
        _PACE,
        "windows=dict.fromkeys(each, _TRIALS), ",
        "",
        _KNOWN,
    ),
    Fault(
        "costs below nothing are taken over",
        _PACE,
        '0 < seconds < float("inf")',
        'seconds < float("inf")',
        f"{_TESTS}test_costs_that_no_run_has_written_are_not_taken_over",
    ),
    Fault(
        "auto leaves no room for what decodes ahead",
        _AUTO,
        "return super().headroom if self.cascade is None else max(super().headroom, self.cascade.headroom)",
        "return super().headroom",
        f"{_TESTS}test_a_model_that_has_no_more_than_four_bits_decodes_ahead_in_these",
    ),
    Fault(
        "auto has a model decode ahead in four bits, whatever they lose",
        "jaxinfer/decoding/drafting/loaded_model.py",
        "return bool(jax.jit(share_lost)(target.params) <= _LOST)",
        "return True",
        f"{_TESTS}test_a_model_that_has_no_more_than_four_bits_decodes_ahead_in_these",
    ),
    Fault(
        "what decodes ahead has as many nodes a step as the drafters alone",
        _AUTO,
        "longest = max(asked.num_draft_tokens, drafters.num_nodes)",
        "longest = max(asked.num_draft_tokens, drafters.num_nodes - 1)",
        f"{_TESTS}test_a_model_that_has_no_more_than_four_bits_decodes_ahead_in_these",
    ),
    Fault(
        "what a model drafts ahead is held for what other drafters would",
        _PACE,
        "        if nodes == self._ahead:\n            sequence.gain_ahead",
        "        if nodes < 0:\n            sequence.gain_ahead",
        f"{_OF_PACE}test_what_it_drafts_says_nothing_of_other_drafters",
    ),
    Fault(
        "the steps of a model that decodes ahead say nothing of its drafters",
        _PACE,
        "if nodes == self._ahead and steps:",
        "if nodes == self._ahead and not steps:",
        f"{_OF_PACE}test_its_own_steps_say_how_well_the_others_would_draft",
    ),
    Fault(
        "what is nearly the best is measured anew as late as any",
        _PACE,
        "_LONGEST_CLOSE if rates[width] >= _CLOSE * rates[best]",
        "_LONGEST_WITHOUT if rates[width] >= _CLOSE * rates[best]",
        f"{_OF_PACE}test_what_is_nearly_the_best_is_measured_anew_soon[1.7-True]",
    ),
    Fault(
        "few nodes ask as many heads as many",
        "jaxinfer/decoding/strategies/medusa.py",
        "return replace(self, paths=paths_for(self.paths, nodes, is_summed=True))",
        "return self",
        "tests/decoding/strategies/test_auto.py::"
        "test_where_rows_cost_time_weights_in_four_bits_are_read_for_a_few_nodes_or_for_many",
    ),
    Fault(
        "on chips too weights in few bits are read for few nodes",
        "jaxinfer/decoding/strategies/auto.py",
        "is_in_four_bits = few_nodes(target) is not None and any(in_four_bits)",
        "is_in_four_bits = any(in_four_bits)",
        "tests/decoding/strategies/test_auto.py::"
        "test_where_rows_cost_time_weights_in_four_bits_are_read_for_a_few_nodes_or_for_many",
    ),
)
