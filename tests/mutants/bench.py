"""Faults of the benchmarks: what is added up, the least time of a step, and the audit of texts."""

from tests.mutants.fault import Fault

_TALLY, _ROOFLINE, _AUDIT = (
    f"jaxinfer/bench/{name}.py" for name in ("acceptance/tally", "latency/roofline", "identity/audit")
)
_SUMS = "tests/bench/test_acceptance.py::test_sums_are_those_made_by_hand"
_BATCH = "tests/bench/test_acceptance.py::test_a_batch_takes_as_long_as_its_slowest_row_and_has_no_times_for_a_part"
_BY_HAND = "tests/bench/test_latency.py::test_costs_are_those_counted_by_hand"
_ALONE = "tests/cli/test_verify.py::test_a_batch_is_held_to_the_bits_of_each_prompt_alone"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a measurement that goes on measures everything again",
        "jaxinfer/bench/acceptance/measure.py",
        "        if known is not None:\n",
        "        if False:\n",
        "tests/bench/test_acceptance.py::test_a_measurement_that_was_cut_short_goes_on",
    ),
    Fault(
        "a measurement does not wait for programs that are compiled beside it",
        "jaxinfer/decoding/programs.py",
        "                each._preparing.result()\n",
        "                pass\n",
        "tests/decoding/programs/test_prepared_programs.py::test_what_was_begun_in_the_background_can_be_waited_for[False]",
    ),
    Fault(
        "a measurement does not wait for what is compiled for pages",
        "jaxinfer/decoding/programs.py",
        "        for each in self.all_sets:\n            if each._preparing",
        "        for each in (self,):\n            if each._preparing",
        "tests/decoding/programs/test_prepared_programs.py::test_what_was_begun_in_the_background_can_be_waited_for[True]",
    ),
    Fault(
        "all strategies are all that the registry has",
        "jaxinfer/bench/acceptance/measure.py",
        "if not found.is_search and name != BASELINE else []",
        "",
        "tests/bench/test_acceptance.py::test_all_strategies_are_those_that_the_model_has_what_they_need_for",
    ),
    Fault(
        "the token of the prefill counts as decoded",
        _TALLY,
        "sum(row.new_tokens - 1 for row in rows)",
        "sum(row.new_tokens for row in rows)",
        _SUMS,
    ),
    Fault(
        "acceptance by depth is a share of the drafts",
        _TALLY,
        "tuple(count / steps if steps else 0.0 for count in by_depth)",
        "tuple(count / drafted if steps else 0.0 for count in by_depth)",
        _SUMS,
    ),
    Fault(
        "a batch takes as long as its rows one after the other",
        _TALLY,
        "sum(max(row.steps for row in group.stats[name]) for group in groups)",
        "sum(sum(row.steps for row in group.stats[name]) for group in groups)",
        _BATCH,
    ),
    Fault(
        "a part of a batch has the batch's time",
        _TALLY,
        "set(group.categories) == {category}",
        "category in group.categories",
        _BATCH,
    ),
    Fault(
        "the cache is read for every query head",
        _ROOFLINE,
        "2 * config.num_layers * config.num_kv_heads",
        "2 * config.num_layers * config.num_heads",
        _BY_HAND,
    ),
    Fault(
        "the roofline counts the whole embedding in a step",
        _ROOFLINE,
        "    return total if config.tied_embeddings else",
        "    return total if total else",
        _BY_HAND,
    ),
    Fault(
        "the faster limit decides",
        _ROOFLINE,
        "return max(self.num_bytes / bytes_per_second",
        "return min(self.num_bytes / bytes_per_second",
        "tests/bench/test_latency.py::test_the_slower_limit_decides",
    ),
    Fault(
        "a tie explains what goes wrong after it",
        _AUDIT,
        "within_error=False, oracle_agrees=False)\n    draws",
        "within_error=False, oracle_agrees=False)\n    tolerance *= 1e9\n    draws",
        "tests/cli/test_verify.py::test_a_tie_explains_neither_a_later_mistake_nor_another_token",
    ),
    Fault(
        "whatever a strategy does after its divergence is explained",
        _AUDIT,
        "margin, margin <= tolerance, bool(agrees.all()))",
        "margin, margin <= tolerance, True)",
        "tests/cli/test_verify.py::test_a_tie_explains_neither_a_later_mistake_nor_another_token",
    ),
    Fault(
        "an audit does not look at log-probabilities",
        _AUDIT,
        "bits_equal=divergence is None and plain.tobytes() == other.tobytes(),",
        "bits_equal=divergence is None,",
        _ALONE,
    ),
    Fault(
        "an audit's reference is a batch",
        _AUDIT,
        'results("autoregressive", 1)',
        'results("autoregressive", batch_size)',
        _ALONE,
    ),
    Fault(
        "a margin explains other tokens where bits are kept",
        _AUDIT,
        "if self.needs_bits:",
        "if self.needs_bits and self.divergence is None:",
        "tests/cli/test_verify.py::test_a_margin_explains_nothing_where_bits_are_kept",
    ),
    Fault(
        "a text that ends early is as good as the whole",
        _AUDIT,
        "if len(plain) == len(found):",
        "if len(plain) >= len(found):",
        "tests/cli/test_verify.py::test_a_text_that_ends_early_is_not_explained",
    ),
    Fault(
        "the bisection reads another row than the text's",
        "jaxinfer/bench/identity/bisect.py",
        "np.asarray(array)[variant.row, :size]",
        "np.asarray(array)[0, :size]",
        "tests/bench/test_bisect.py::test_what_does_not_differ_is_not_found",
    ),
    Fault(
        "the bisection numbers a piece's tokens from the piece's start",
        "jaxinfer/bench/identity/bisect.py",
        "np.concatenate([piece[name] for piece in pieces])) for name",
        "np.concatenate([piece[name] for piece in pieces[::-1]])) for name",
        "tests/bench/test_bisect.py::test_a_deliberate_dependence_is_found_where_it_is",
    ),
    Fault(
        "a prompt that fills the context is met in the middle of a measurement",
        "jaxinfer/bench/throughput/measure.py",
        "if len(prompt) >= lm.max_len:",
        "if len(prompt) > lm.max_len:",
        "tests/bench/test_throughput.py::test_a_prompt_without_room_is_refused_before_anything_runs",
    ),
    Fault(
        "drawn lengths have the variance for their deviation",
        "jaxinfer/bench/throughput/lengths.py",
        "rng.gamma(spread**-2, mean * spread**2, len(rooms))",
        "rng.gamma(spread**-1, mean * spread, len(rooms))",
        "tests/bench/test_throughput.py::test_lengths_have_the_mean_and_the_spread_that_are_asked_for",
    ),
    Fault(
        "the engine is compared with batches of other lengths",
        "jaxinfer/bench/throughput/table.py",
        "{load.tokens_per_second / compared[size]:.2f}x",
        "{load.tokens_per_second / max(compared.values()) / 2:.2f}x",
        "tests/bench/test_throughput.py::test_the_chart_shows_the_engine_beside_static_batches_of_the_same_lengths",
    ),
    Fault(
        "tokens that windows share are scored twice",
        "jaxinfer/bench/quality/windows.py",
        "first = max(begin + 1, scored)",
        "first = begin + 1",
        "tests/bench/test_quality.py::test_every_token_is_scored_once_with_as_much_before_it_as_there_is",
    ),
    Fault(
        "the divergence is of the reference from the other",
        "jaxinfer/decoding/scoring.py",
        "jnp.exp(known) * (known - found)",
        "jnp.exp(found) * (found - known)",
        "tests/bench/test_quality.py::test_figures_are_those_of_the_logits",
    ),
    Fault(
        "levels of any number of bits are one too many",
        "jaxinfer/bench/quality/bit_widths.py",
        "((most - least) / (2**bits - 1))",
        "((most - least) / 2**bits)",
        "tests/bench/test_quality.py::test_weights_are_the_nearest_of_evenly_spaced_levels_of_their_group",
    ),
    Fault(
        "what many bits take is counted without scales",
        "jaxinfer/bench/quality/bit_widths.py",
        "return self.bits + 8 * _GROUP_BYTES / self.group",
        "return float(self.bits)",
        "tests/bench/test_quality.py::test_a_model_in_any_number_of_bits_takes_their_bytes_and_stands_for_what_they_do",
    ),
    Fault(
        "an interrupt loses what was measured",
        "jaxinfer/cli/commands/quality.py",
        "        if report.results:",
        "        if report.complete:",
        "tests/bench/test_quality.py::test_an_interrupt_shows_what_is_done",
    ),
    Fault(
        "lanes that hold positions are not read",
        "jaxinfer/bench/latency/roofline.py",
        "width = cached_width(config, backend)",
        "width = config.head_dim",
        "tests/bench/test_latency.py::test_lanes_that_hold_positions_are_read_and_multiplied",
    ),
    Fault(
        "a needle stands at the other end of its text",
        "jaxinfer/bench/needle/haystack.py",
        "round(depth * len(plain))",
        "round((1 - depth) * len(plain))",
        "tests/bench/test_needle.py::test_a_fact_stands_where_it_is_said_to_and_the_end_asks_for_it[0.3]",
    ),
)
