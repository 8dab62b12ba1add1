"""Faults of `auto`: what it drafts with, when it drafts, and what it keeps of what steps cost."""

from tests.mutants.fault import Fault

_PACE, _KEPT = "jaxinfer/engine/pace.py", "jaxinfer/engine/kept_pace.py"
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
        "jaxinfer/decoding/strategies/auto.py",
        "if self.parts == _UNTRAINED and is_shipped(",
        "if self.parts != _UNTRAINED and is_shipped(",
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
        "_Seen(each, dict.fromkeys(each, _TRIALS), kept=set(each))",
        "_Seen(each, kept=set(each))",
        _KNOWN,
    ),
    Fault(
        "costs below nothing are taken over",
        _PACE,
        '0 < seconds < float("inf")',
        'seconds < float("inf")',
        f"{_TESTS}test_costs_that_no_run_has_written_are_not_taken_over",
    ),
)
