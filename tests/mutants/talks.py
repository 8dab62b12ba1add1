"""Faults of the talks' tables, their equations and counts and what is made again; and of the best answers."""

from tests.mutants.fault import Fault

_TESTS = "tests/train/talks/test_tables.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "break-even leaves out the pass of the target that verifies",
        "train/talks/break_even.py",
        "return (gamma * latency + 1) / stream_cost",
        "return gamma * latency / stream_cost",
        f"{_TESTS}::test_on_the_line_neither_is_faster_and_above_it_the_draft_model_is",
    ),
    Fault(
        "a verification of the drafts is priced as a plain step",
        "train/talks/break_even.py",
        'target = step[plain["strategy"]] * max(1.0, task["verify_cost"])',
        'target = step[plain["strategy"]]',
        f"{_TESTS}::test_two_models_are_counted_and_priced_and_their_points_lie_on_the_equation",
    ),
    Fault(
        "a command that ran with other options is not run again",
        "train/talks/setup.py",
        'path = options.work / f"{name}_{_digest(command, *words)}.json"',
        'path = options.work / f"{name}.json"',
        f"{_TESTS}::test_two_models_are_counted_and_priced_and_their_points_lie_on_the_equation",
    ),
    Fault(
        "trees of streams count as calls of a draft model",
        "train/talks/two_models.py",
        'if kind == "draft model" else 0.0',
        'if kind != "plain" else 0.0',
        f"{_TESTS}::test_two_models_are_counted_and_priced_and_their_points_lie_on_the_equation",
    ),
    Fault(
        "scales and minima cost no bits",
        "train/talks/bits.py",
        "+ 32 / _GROUP",
        "+ 0",
        f"{_TESTS}::test_models_of_a_family_are_compared_at_equal_bits_of_their_matrices",
    ),
    Fault(
        "of equal answers the last are kept",
        "train/data/best_answers.py",
        "key=lambda at: (-scores[at], at)",
        "key=lambda at: (-scores[at], -at)",
        "tests/train/data/test_best_answers.py::test_the_best_come_in_their_order_and_of_equals_the_first",
    ),
    Fault(
        "a text that goes round in circles passes",
        "train/data/best_answers.py",
        "len(set(runs)) >= _DIFFERENT * len(runs)",
        "len(runs) >= _DIFFERENT * len(runs)",
        "tests/train/data/test_best_answers.py::test_checks_find_texts_that_do_not_end_and_that_go_round_in_circles",
    ),
)
