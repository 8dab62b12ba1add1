"""Faults of the engine: pages, prefixes, the scheduler's order, rows that come back, failures."""

from tests.mutants.fault import Fault

_PAGES, _PREFIXES, _SCHEDULER = (f"jaxinfer/engine/{name}.py" for name in ("pages", "prefixes", "scheduler"))
_CORE, _PROGRAMS, _DEVICE = (f"jaxinfer/engine/{name}.py" for name in ("core", "programs", "device"))
_PAGED, _ATTENTION = "jaxinfer/cache/paged.py", "jaxinfer/ops/cpu_kernels/attention_code.py"
_POOL, _POLICY, _LAW = (f"tests/engine/test_{name}.py" for name in ("pages", "scheduler", "law"))
_SERVE_ALL, _ALL = "jaxinfer/engine/serve_all.py", "tests/engine/test_serve_all.py"
_USERS, _ROPE = "tests/engine/test_engine.py", "tests/engine/test_rope.py"
_WARM = "tests/engine/test_warm_up.py"
_GOES_ON = f"{_LAW}::test_who_made_room_goes_on_where_it_was"
_CHANGES_NO_BIT = f"{_LAW}::test_load_changes_no_bit[draft_model]"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a page is free while another still uses it",
        _PAGES,
        "            if self._users[page]:\n                continue\n",
        "",
        f"{_POOL}::test_shared_pages_are_free_when_the_last_user_lets_go",
    ),
    Fault(
        "the page that was let go last is used anew first",
        _PAGES,
        "self._cached.popitem(last=False)",
        "self._cached.popitem()",
        f"{_POOL}::test_cached_pages_are_used_anew_in_the_order_in_which_they_were_let_go_last_ones_of_a_text_first",
    ),
    Fault(
        "a page used anew can still be found",
        _PAGES,
        "                self.forget(page)\n            self._users[page] = 1",
        "            self._users[page] = 1",
        f"{_POOL}::test_pages_used_anew_are_found_no_more",
    ),
    Fault(
        "a page's key forgets what stands before it",
        _PREFIXES,
        "hashlib.sha256(parent + content)",
        "hashlib.sha256(content)",
        f"{_POOL}::test_equal_tokens_after_other_tokens_are_another_page",
    ),
    Fault(
        "tenants share pages",
        _PREFIXES,
        "hashlib.sha256(salt.encode())",
        'hashlib.sha256(b"")',
        f"{_POOL}::test_a_prefix_is_found_by_whole_pages_from_its_beginning",
    ),
    Fault(
        "the last token of a prompt is not computed again",
        _SCHEDULER,
        "return (sequence.to_fill - 1) // self.config.page_size",
        "return sequence.to_fill // self.config.page_size",
        f"{_POLICY}::test_the_last_token_of_a_prompt_is_always_computed",
    ),
    Fault(
        "pages of answers are shared where only prompts may be",
        _SCHEDULER,
        "shared = min(shared, sequence.prompt_length)",
        "pass",
        f"{_POLICY}::test_pages_of_answers_are_shared_only_where_they_may_be",
    ),
    Fault(
        "chunks begin where the last one ended, on no grid",
        _SCHEDULER,
        "end = min((sequence.computed // size + 1) * size, sequence.to_fill)",
        "end = min(sequence.computed + size, sequence.to_fill)",
        f"{_POLICY}::test_chunks_end_on_an_absolute_grid_after_a_shared_prefix_too",
    ),
    Fault(
        "prompts interrupt decoding whatever the ratio",
        _SCHEDULER,
        "int(len(self.running) * self.config.waiting_served_ratio)",
        "0",
        f"{_POLICY}::test_as_many_wait_before_decoding_pauses_as_the_ratio_says",
    ),
    Fault(
        "nobody waits long enough to interrupt",
        _SCHEDULER,
        "self._steps_since_admission >= self.config.max_waiting_tokens",
        "self._steps_since_admission < 0",
        f"{_POLICY}::test_who_waits_long_enough_interrupts_whatever_the_ratio",
    ),
    Fault(
        "two chunks run between two windows",
        _SCHEDULER,
        "window = self._window(now) if self._was_chunk else None",
        "window = None",
        f"{_POLICY}::test_a_prompt_is_computed_in_chunks_between_which_others_decode",
    ),
    Fault(
        "the first makes room, not the last",
        _SCHEDULER,
        "self._ordered([*self.prefilling, *self.running], now)[-1]",
        "self._ordered([*self.prefilling, *self.running], now)[0]",
        f"{_POLICY}::test_where_pages_run_out_the_last_makes_room_and_comes_back",
    ),
    Fault(
        "waiting adds nothing to a priority",
        _SCHEDULER,
        "-(sequence.priority + (now - sequence.arrival) // aging)",
        "-sequence.priority",
        f"{_POLICY}::test_waiting_adds_to_a_priority",
    ),
    Fault(
        "a long prompt waits for ever behind short ones",
        _SCHEDULER,
        "oldest.skipped >= _MOST_SKIPS",
        "oldest.skipped < 0",
        f"{_POLICY}::test_a_short_prompt_overtakes_a_long_one_but_not_for_ever",
    ),
    Fault(
        "a sequence that ends keeps its pages",
        _SCHEDULER,
        "        self._release(sequence)\n        sequence.stage, sequence.saved",
        "        sequence.stage, sequence.saved",
        f"{_POLICY}::test_those_that_are_cancelled_or_late_are_named_wherever_they_are",
    ),
    Fault(
        "a window gets no pages for its last steps",
        _SCHEDULER,
        "self.config.steps_per_look * self._tokens_per_step, sequence.max_length",
        "self.config.steps_per_look, sequence.max_length",
        f"{_POLICY}::test_all_that_arrive_end_and_nothing_is_lost",
    ),
    Fault(
        "a window's rows go back to other rows",
        _PROGRAMS,
        "    return _pools(after.cache), put_batch(rows, kept, axes, slots_B), report",
        "    return _pools(after.cache), put_batch(rows, kept, axes, jnp.roll(slots_B, 1)), report",
        _CHANGES_NO_BIT,
    ),
    Fault(
        "a sequence that made room comes back without its last pages",
        _CORE,
        "held = self.scheduler.pages_for(len(sequence.tokens))",
        "held = self.scheduler.pages_for(len(sequence.tokens)) // 2",
        f"{_GOES_ON}[draft_model-offload]",
    ),
    Fault(
        "a sequence that is computed again draws a token twice",
        _CORE,
        "draws = len(sequence.tokens) == sequence.prompt_length",
        "draws = True",
        f"{_GOES_ON}[draft_model-recompute]",
    ),
    Fault(
        "rows come back to the pages of others",
        _DEVICE,
        "self._padded(pages, self._num_pages)",
        "self._padded(pages[::-1], self._num_pages)",
        f"{_GOES_ON}[draft_model-offload]",
    ),
    Fault(
        "a failure of the device ends the requests of others",
        _CORE,
        "        for sequence in failed:\n",
        "        for sequence in self._alive():\n",
        f"{_USERS}::test_a_failure_of_the_device_ends_the_requests_that_it_hit_and_no_others",
    ),
    Fault(
        "a callback's mistake ends the engine",
        _CORE,
        "            except Exception as error:\n                # A callback",
        "            except MemoryError as error:\n                # A callback",
        f"{_USERS}::test_a_callback_gets_every_piece_and_its_mistakes_are_its_own",
    ),
    Fault(
        "texts of two rotations share pages",
        _CORE,
        "sequence.salt = salt_of(rotary_regime(self._config, sequence.context_length), sequence.salt)",
        "pass",
        _ROPE,
    ),
    Fault(
        "rows without pages write to page 0",
        _PAGED,
        "(slots_BT < self.num_slots) & (page_BT > 0)",
        "(slots_BT < self.num_slots)",
        "tests/cache/test_paged.py::test_rows_without_pages_write_nothing",
    ),
    Fault(
        "attention reads pages in the pool's order",
        _ATTENTION,
        'page = code.arithmetic("add", page, *_numbers(code, "first_page"))',
        'page = code.arithmetic("add", column.index, *_numbers(code, "first_page"))',
        "tests/ops/test_cpu_attention.py::test_pages_change_no_bit_wherever_they_lie",
    ),
    Fault(
        "scores of a page begin at the page's first slot",
        _ATTENTION,
        'code.arithmetic("sub", begin, start))\n        place',
        "0)\n        place",
        "tests/ops/test_cpu_attention.py::test_pages_change_no_bit_wherever_they_lie",
    ),
    Fault(
        "a smaller program is never prepared",
        _DEVICE,
        "if shape != shapes[0]:",
        "if not shapes:",
        f"{_WARM}::test_larger_programs_run_until_those_that_fit_are_there",
    ),
    Fault(
        "a request waits for the program that fits it",
        _DEVICE,
        "shape = shapes[-1]",
        "shape = shapes[0]",
        f"{_WARM}::test_larger_programs_run_until_those_that_fit_are_there",
    ),
    Fault(
        "warming up leaves out how sequences enter",
        _DEVICE,
        "            *(self._shaped_enter(tokens, wide) for wide in reversed(columns) for tokens in "
        "self._texts_within(wide)),\n",
        "",
        f"{_WARM}::test_after_warming_up_no_request_waits_for_a_program",
    ),
    Fault(
        "generate gives no row to the next prompt before all have ended",
        _SERVE_ALL,
        "max_rows=num_rows,",
        "max_rows=1,",
        f"{_ALL}::test_results_are_those_of_each_prompt_alone[prompt_lookup]",
    ),
    Fault(
        "samples of a prompt are results of several",
        _SERVE_ALL,
        "        count += 1\n",
        "        break\n",
        f"{_ALL}::test_results_are_those_of_each_prompt_alone[prompt_lookup]",
    ),
    Fault(
        "generate refills the rows of a beam search",
        "jaxinfer/language_model.py",
        "can_share = is_plain and not strategy.needs_dense_cache",
        "can_share = is_plain",
        f"{_ALL}::test_what_needs_no_other_prompt_runs_as_batches[options2]",
    ),
    Fault(
        "every thread that asks compiles a program of its own",
        "jaxinfer/decoding/programs.py",
        "is_first = future is None",
        "is_first = True",
        "tests/decoding/test_prepared_programs.py::test_threads_that_ask_together_get_one_program",
    ),
    Fault(
        "what cannot be compiled is tried again and again",
        "jaxinfer/decoding/programs.py",
        "            self._failed.add(_key(name, rest[2:]))\n",
        "            pass\n",
        "tests/decoding/test_prepared_programs.py::test_what_cannot_be_compiled_is_tried_once_and_raises_where_it_runs",
    ),
)
