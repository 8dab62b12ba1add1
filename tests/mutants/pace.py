"""Faults of how many nodes windows verify: what steps cost, and what texts gain from them."""

from tests.mutants.fault import Fault

_PACE, _PACES = "jaxinfer/engine/pace.py", "tests/engine/test_pace.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "drafting goes on where it loses",
        _PACE,
        "pays = self._best_of(sequences, seen, list(seen.costs)) != _PLAIN",
        "pays = True",
        f"{_PACES}::test_where_drafts_lose_windows_go_at_plain_speed[1-costs0-gains0]",
    ),
    Fault(
        "drafting that lost is never tried again",
        _PACE,
        "else seen.rest if is_next_best else longest",
        "else longest * 9",
        f"{_PACES}::test_drafting_begins_again_when_the_text_changes",
    ),
    Fault(
        "what a text gains from few nodes says nothing of many",
        _PACE,
        "        else:\n            self._note_gain(sequence, factor, steps)\n",
        "",
        f"{_PACES}::test_what_few_nodes_give_tells_what_many_would",
    ),
    Fault(
        "what many nodes give is thought of as no more than what few do",
        _PACE,
        "1 - chance**nodes",
        "1 - chance ** min(nodes, 4)",
        f"{_PACES}::test_a_text_that_takes_nearly_all_of_few_nodes_gets_many",
    ),
    Fault(
        "what an earlier process has measured is believed for long",
        _PACE,
        "longest = _LONGEST_UNSEEN if width in seen.kept else ",
        "longest = ",
        f"{_PACES}::test_costs_of_a_busy_time_are_soon_corrected",
    ),
    Fault(
        "all numbers of rows share their costs",
        _PACE,
        "self._by_rows.setdefault((len(sequences) - 1).bit_length(), _Seen())",
        "self._by_rows.setdefault(0, _Seen())",
        f"{_PACES}::test_each_number_of_rows_has_its_own_costs",
    ),
    Fault(
        "what all steps cost more is counted for those that ran",
        _PACE,
        "own = _NEWEST_OWN if nodes != seen.newest else 0.0",
        "own = 1.0",
        f"{_PACES}::test_what_makes_all_steps_dearer_changes_no_choice",
    ),
    Fault(
        "what is tried is looked at seldom",
        _PACE,
        "if nodes != self._best_of(sequences, seen, known):",
        "if nodes < 0:",
        f"{_PACES}::test_looks_are_rare_where_the_choice_is_known",
    ),
    Fault(
        "a new text is taken to gain what others did",
        _PACE,
        "_hope(sequences, seen.windows[hopeful]) * rates[hopeful] > rates[_PLAIN]",
        "rates[hopeful] > rates[_PLAIN]",
        f"{_PACES}::test_a_new_text_is_tried_where_drafts_hardly_lose",
    ),
    Fault(
        "a text's first steps count as little as later ones",
        _PACE,
        "max(steps / (_STEPS_OF_USUAL + before + steps), 1 - (1 - _NEWEST_GAIN) ** steps)",
        "1 - (1 - _NEWEST_GAIN) ** steps",
        f"{_PACES}::test_half_of_what_eight_steps_gain_is_believed",
    ),
    Fault(
        "what two windows cost is believed",
        _PACE,
        "sum(unknown) / len(sequences) ** 1.5 + _TRIALS / windows",
        "sum(unknown) / len(sequences) ** 1.5",
        f"{_PACES}::test_a_cost_that_few_windows_have_shown_is_doubted",
    ),
    Fault(
        "what the first window has shown is looked for among what an earlier process has seen",
        _PACE,
        "seen.costs.get(nodes, cost)",
        "seen.costs[nodes]",
        f"{_PACES}::test_what_an_earlier_process_has_not_seen_is_tried",
    ),
    Fault(
        "a clock that stands still divides by nothing",
        _PACE,
        "        cost = max(cost, _LEAST_COST)\n",
        "",
        f"{_PACES}::test_a_clock_that_stands_still_is_survived",
    ),
    Fault(
        "a model's own steps are measured by the few that had as many nodes",
        _PACE,
        "found / max(self._usual_of_others(), _LEAST_CHANCE)",
        "found / max(self._usual_of(self._own_nodes), _LEAST_CHANCE)",
        f"{_PACES}::test_few_windows_of_its_own_number_of_nodes_are_no_measure_of_its_steps",
    ),
    Fault(
        "what the first window gave stays usual for long",
        _PACE,
        "max(steps / (before + steps), 1 - (1 - _NEWEST_USUAL) ** steps)",
        "1 - (1 - _NEWEST_USUAL) ** steps",
        f"{_PACES}::test_the_first_window_is_one_of_many",
    ),
    Fault(
        "a window of long steps keeps prompts waiting",
        _PACE,
        "min(most, int(_LONGEST_BETWEEN * most * costs[_PLAIN] / costs[nodes]))",
        "most",
        f"{_PACES}::test_a_window_that_somebody_waits_for_is_about_as_long_as_a_plain_one",
    ),
    Fault(
        "a prompt's chunk counts as a step's time",
        "jaxinfer/engine/core.py",
        "if self._pace is not None and self._computes:",
        "if self._pace is None and self._computes:",
        "tests/engine/test_resting.py::test_the_time_of_a_prompts_chunk_is_not_that_of_steps",
    ),
)
