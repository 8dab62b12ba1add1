"""Faults of strategies of their own kind in an engine.

Of beam searches: pages that rows share, rows that come back, searches that begin anew. Of TriForce: what it copies from
pages.
"""

from tests.mutants.fault import Fault

_PAGED, _SCHEDULER = "jaxinfer/cache/paged.py", "jaxinfer/engine/scheduler.py"
_HELD = "jaxinfer/engine/held_pages.py"
_SEQUENCE, _CORE = "jaxinfer/engine/beam_sequence.py", "jaxinfer/engine/beam_core.py"
_FORKS = "tests/cache/test_paged.py::test_rows_that_go_on_from_others_read_what_these_held_and_write_pages_of_their_own"
_POLICY, _LAW = "tests/engine/test_beam_sequence.py", "tests/engine/test_beams.py"
_COMES_BACK = f"{_POLICY}::test_pages_in_common_are_in_common_again"
_RETRIEVAL = "tests/cache/test_retrieval.py"
_GOES_ON = f"{_LAW}::test_searches_that_make_room_go_on_where_they_were"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a row that goes on from another shares the page that it writes to",
        _PAGED,
        "jnp.arange(num_columns) < full_B1",
        "jnp.arange(num_columns) <= full_B1",
        _FORKS,
    ),
    Fault(
        "the page that is not full is not copied",
        _PAGED,
        "jnp.where(is_copied_B, own_B, num_pages)",
        "jnp.full_like(own_B, num_pages)",
        _FORKS,
    ),
    Fault(
        "rows that have died keep their pages",
        _HELD,
        "        self.give_back(before)\n",
        "",
        f"{_POLICY}::test_a_row_that_dies_gives_its_pages_back",
    ),
    Fault(
        "a search is taken that its pages are too few for",
        _HELD,
        "of_row + (sequence.rows - 1) *",
        "of_row + 0 *",
        f"{_POLICY}::test_a_search_that_may_need_more_than_there_is_does_not_fit",
    ),
    Fault(
        "a search is admitted with the pages of one row",
        _SCHEDULER,
        "self.held.pool.take(missing * sequence.rows)",
        "self.held.pool.take(missing)",
        _GOES_ON,
    ),
    Fault(
        "later prompts find the texts of a row",
        _HELD,
        "len(sequence.tokens) if sequence.rows == 1 else sequence.prompt_length",
        "len(sequence.tokens)",
        f"{_POLICY}::test_later_prompts_find_prompts_and_no_text_of_a_row",
    ),
    Fault(
        "a window of searches begins on tables that are out of date",
        _SCHEDULER,
        "if sequences[0].rows > 1:",
        "if sequences[0].rows > 9:",
        _GOES_ON,
    ),
    Fault(
        "what rows had in common is not in common when they come back",
        _SEQUENCE,
        "firsts.setdefault((column, page), row)",
        "row",
        _COMES_BACK,
    ),
    Fault(
        "what rows have in common is computed once for each",
        _SEQUENCE,
        "self.row, self.computed = row, first * page_size",
        "self.row, self.computed = row, 0",
        _COMES_BACK,
    ),
    Fault(
        "a search that comes back has lost its scores",
        _CORE,
        "            self._device.write_row(sequence.slot, sequence.kept)\n",
        "",
        _GOES_ON,
    ),
    Fault(
        "a search goes on whose device has lost everything",
        _CORE,
        "        if isinstance(sequence, BeamSequence):\n            self._begin_anew(sequence)\n",
        "        pass\n",
        f"{_LAW}::test_a_failing_device_lets_the_others_search_anew",
    ),
    Fault(
        "a retrieval cache chooses among the chunks of another row",
        _PAGED,
        "pool[layer, self.table_BX]",
        "pool[layer, self.table_BX[::-1]]",
        f"{_RETRIEVAL}::test_pages_give_what_a_dense_cache_gives",
    ),
    Fault(
        "slots are read from pages as if a row had all of them",
        _PAGED,
        "places = page_places(self.table_BX, slots_BM, self.keys)\n        return read",
        "places = (slots_BM // self.page_size, slots_BM % self.page_size)\n        return read",
        f"{_RETRIEVAL}::test_pages_give_what_a_dense_cache_gives",
    ),
    Fault(
        "a table of few pages has no chunks to choose from",
        "jaxinfer/cache/retrieval.py",
        "min(self.budget // chunk, scores_BKC.shape[2])",
        "self.budget // chunk",
        f"{_RETRIEVAL}::test_a_table_of_fewer_chunks_than_the_budget_gives_what_there_is",
    ),
    Fault(
        "queries past the first page are not recorded",
        "jaxinfer/cache/recording.py",
        "self.cache.num_slots",
        "self.cache.keys.shape[2]",
        f"{_RETRIEVAL}::test_queries_of_texts_on_pages_are_recorded",
    ),
)
