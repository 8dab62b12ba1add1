"""Faults of the cache: masks and rings, streaming sinks and their rotation, commit and rewind, retrieval."""

from tests.mutants.fault import Fault

_DENSE, _RING, _SLOTS = "jaxinfer/cache/dense.py", "jaxinfer/cache/ring.py", "jaxinfer/cache/slots.py"
_STREAMING, _RETRIEVAL = "jaxinfer/cache/streaming.py", "jaxinfer/cache/retrieval.py"
_RETRIEVING = "jaxinfer/cache/retrieving.py"
_BY_RULE = "tests/cache/test_retrieving.py::test_each_query_reads_the_chunks_that_suit_it_best[True]"
_MASKS, _RECORDING = "jaxinfer/ops/masks.py", "jaxinfer/cache/recording.py"
_BYTES, _NUMBERS = "jaxinfer/ops/rows_in_bytes.py", "tests/ops/test_rows_in_bytes.py"
_TREES = "tests/cache/test_laws.py::test_trees_see_what_was_kept_and_their_own_ancestors"
_CHUNKS = "tests/cache/test_laws.py::test_prompts_in_chunks_see_what_is_before_them"
_CHOSEN = "tests/cache/test_retrieval.py::"

_FEATURES, _FEATURE_TESTS = "jaxinfer/cache/features.py", "tests/cache/test_features.py::"
_OF_TEXTS = f"{_FEATURE_TESTS}test_features_of_decoded_texts_are_those_of_a_pass_over_them"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "features of a step stay where its nodes stood",
        "jaxinfer/cache/interface.py",
        "self.features and self.features.keep(start_B, path_BM, count_B)",
        "self.features",
        f"{_OF_TEXTS}[sum-dense]",
    ),
    Fault(
        "features of some layers are those of the first ones",
        _FEATURES,
        "by_layer[self.layers.index(layer)]",
        "by_layer[layers.index(layer)]",
        f"{_OF_TEXTS}[sum-dense]",
    ),
    Fault(
        "features on pages stand one slot on",
        _FEATURES,
        "pages_BT, inner_BT = page_places(self.table_BX, slots_BT, self.values)",
        "pages_BT, inner_BT = page_places(self.table_BX, slots_BT + 1, self.values)",
        f"{_OF_TEXTS}[chain-paged:page=16]",
    ),
    Fault(
        "features are summed with a verification that writes none",
        "jaxinfer/decoding/strategies/sum_of_drafters.py",
        "if reading and (verifying :=",
        "if not reading and (verifying :=",
        f"{_FEATURE_TESTS}test_verification_that_keeps_no_features_is_refused_beside_who_reads_them",
    ),
    Fault(
        "chunks keep the means of drafts that were dropped",
        _RETRIEVING,
        "first_B = jnp.maximum(start_B - self.recent, 0) // self.chunk",
        "first_B = start_B // self.chunk",
        _BY_RULE,
    ),
    Fault(
        "a draft's node chooses as the token before it",
        _RETRIEVING,
        "position_BT = start_B[:, None] + node_depths(placement.seen.ancestors_BTT)",
        "position_BT = start_B[:, None] + 0 * node_depths(placement.seen.ancestors_BTT)",
        _BY_RULE,
    ),
    Fault(
        "all heads of a text read what the first one chooses",
        _RETRIEVING,
        "query_ITH = jnp.sum(query_ITGH.astype(self.means.dtype), axis=2)",
        "query_ITH = jnp.repeat(jnp.sum(query_ITGH.astype(self.means.dtype), axis=2)[::2], 2, axis=0)",
        _BY_RULE,
    ),
    Fault(
        "a cropped block is prefilled from the beginning of its text",
        "jaxinfer/decoding/step.py",
        "jnp.minimum(begin_B[:, None] + jnp.arange(num_tokens), state.tokens_BS.shape[1] - 1)",
        "jnp.minimum(0 * begin_B[:, None] + jnp.arange(num_tokens), state.tokens_BS.shape[1] - 1)",
        "tests/cache/test_cropped.py::test_each_token_is_drawn_from_the_last_block[13]",
    ),
    Fault(
        "a cropped block keeps one token too few",
        "jaxinfer/decoding/cropping.py",
        "stride = context + 1 - layout.kept(context)",
        "stride = context + 2 - layout.kept(context)",
        "tests/cache/test_cropped.py::test_each_token_is_drawn_from_the_last_block[13]",
    ),
    Fault(
        "a window is one token too wide",
        _MASKS,
        "key_BS[:, None, :] >= oldest(window, query_BT)[:, :, None]",
        "key_BS[:, None, :] >= oldest(window, query_BT)[:, :, None] - 1",
        f"{_TREES}[dense-window-3]",
    ),
    Fault(
        "siblings see each other",
        _MASKS,
        "seen_BTS = jnp.take_along_axis(ancestors_BTA, index_B1S, axis=2)",
        "seen_BTS = index_B1S <= jnp.arange(num_tokens)[None, :, None]",
        f"{_TREES}[dense]",
    ),
    Fault(
        "a dense cache commits one slot too far",
        _DENSE,
        "(start_B[:, None] + places_BM for places_BM in path_moves(path_BM, count_B))",
        "(start_B[:, None] + 1 + places_BM for places_BM in path_moves(path_BM, count_B))",
        f"{_TREES}[dense]",
    ),
    Fault(
        "a commit leaves out the last taken node",
        _SLOTS,
        "jnp.where(step_M < count_B[:, None], path_BM, step_M)",
        "jnp.where(step_M < count_B[:, None] - 1, path_BM, step_M)",
        f"{_TREES}[dense]",
    ),
    Fault(
        "a ring's commit does not go around",
        _RING,
        "((start_B[:, None] + places_BM) % self.capacity for places_BM in moves)",
        "(start_B[:, None] + places_BM for places_BM in moves)",
        f"{_TREES}[ring-window-3]",
    ),
    Fault(
        "a ring shows what stood in it before the text began",
        _RING,
        "in_window(position_BT, old_position_BC, self.window) & (old_position_BC >= 0)[:, None, :]",
        "in_window(position_BT, old_position_BC, self.window)",
        f"{_TREES}[ring-window-3]",
    ),
    Fault(
        "padding evicts tokens from a ring",
        _RING,
        "(index_T < last_B1) & (index_T >= last_B1 - capacity)",
        "index_T >= num_tokens - capacity",
        f"{_CHUNKS}[ring-window-3]",
    ),
    Fault(
        "sinks leave with the window",
        _STREAMING,
        "is_held_BS[:, None, :] & (is_sink_S | in_window(position_BT, old_BS, self.window))",
        "is_held_BS[:, None, :] & in_window(position_BT, old_BS, self.window)",
        f"{_TREES}[streaming-2-3]",
    ),
    Fault(
        "a streaming cache's commit forgets the ring behind the sinks",
        _STREAMING,
        "(self.slots(start_B[:, None] + places_BM) for places_BM in path_moves(path_BM, count_B))",
        "(start_B[:, None] + places_BM for places_BM in path_moves(path_BM, count_B))",
        f"{_TREES}[streaming-2-3]",
    ),
    Fault(
        "sinks come nearer by one position too few",
        _STREAMING,
        "jnp.maximum(position_BT + 1 - self.sinks - self.window, 0)",
        "jnp.maximum(position_BT - self.sinks - self.window, 0)",
        "tests/cache/test_streaming.py::test_it_equals_the_dense_forward_that_rotates_by_cache_index[gemma]",
    ),
    Fault(
        "sinks are turned away instead of nearer",
        _STREAMING,
        "rotate(own_BTNH, cosines_BTR, -sines_BTR)",
        "rotate(own_BTNH, cosines_BTR, sines_BTR)",
        "tests/cache/test_streaming.py::test_it_equals_the_dense_forward_that_rotates_by_cache_index[gemma]",
    ),
    Fault(
        "the first chunk is not always retrieved",
        _RETRIEVAL,
        "jnp.where(index_C == 0, jnp.inf, scores_BKC)",
        "scores_BKC",
        f"{_CHOSEN}test_each_head_of_each_layer_holds_the_chunks_that_its_queries_score_best",
    ),
    Fault(
        "all heads retrieve what the first one asks for",
        _RETRIEVAL,
        "_, chosen_BKC = top_k(scores_BKC,",
        "_, chosen_BKC = top_k(jnp.broadcast_to(scores_BKC[:, :1], scores_BKC.shape),",
        f"{_CHOSEN}test_each_head_of_each_layer_holds_the_chunks_that_its_queries_score_best",
    ),
    Fault(
        "the recent tokens do not stay in the tail",
        _RETRIEVAL,
        "jnp.maximum(held_B - recent, 0) // chunk * chunk",
        "held_B // chunk * chunk",
        f"{_CHOSEN}test_the_tail_begins_where_chunks_could_be_chosen_and_holds_the_recent_tokens",
    ),
    Fault(
        "more chunks count as retrieved than the budget holds",
        _RETRIEVAL,
        "jnp.minimum(num_chunks_B, self.budget // chunk) * chunk",
        "num_chunks_B * chunk",
        f"{_CHOSEN}test_each_head_of_each_layer_holds_the_chunks_that_its_queries_score_best",
    ),
    Fault(
        "what drafts wrote over the tail stays there",
        _RETRIEVAL,
        "jnp.where(behind_BM >= 0, self.budget + behind_BM, self.keys.shape[2])",
        "jnp.where(behind_BM >= 0, self.keys.shape[2], self.keys.shape[2])",
        f"{_CHOSEN}test_tokens_are_copied_anew_where_they_stand_in_the_tail",
    ),
    Fault(
        "queries of all layers are recorded as the first one's",
        _RECORDING,
        "self.queries_LBTNH.at[layer].set(recorded_BTNH)",
        "self.queries_LBTNH.at[0].set(recorded_BTNH)",
        f"{_CHOSEN}test_a_recording_cache_attends_as_the_cache_does_and_holds_the_queries",
    ),
    Fault(
        "integers of 8 bits overflow",
        _BYTES,
        '"int8": 127.0',
        '"int8": 128.0',
        f"{_NUMBERS}::test_numbers_come_back_as_near_as_bits_allow_and_nothing_overflows",
    ),
    Fault(
        "the bytes of a head's scale are those of two heads",
        _BYTES,
        "scales = jnp.swapaxes(scales.reshape(*lead, shards, SCALE_BYTES, heads), -1, -2)",
        "scales = scales.reshape(*lead, shards, heads, SCALE_BYTES)",
        f"{_NUMBERS}::test_numbers_come_back_as_near_as_bits_allow_and_nothing_overflows",
    ),
    Fault(
        "queries are not evened out as keys are",
        "jaxinfer/ops/hadamard.py",
        "return evened_query(query_BTNH, platform), transform",
        "return query_BTNH, transform",
        f"{_NUMBERS}::test_evened_queries_and_keys_have_the_same_products",
    ),
    Fault(
        "slots that are dropped are written to the last page",
        "jaxinfer/ops/pages.py",
        "return jnp.where(pages_X < pool_LPZF.shape[1], pages_X, 0), slots_X",
        "return pages_X, slots_X",
        "tests/cache/test_paged.py::test_pages_written_one_by_one_are_those_of_a_scatter",
    ),
    Fault(
        "a page in bytes loses what else was in the tile of a slot that is written",
        "jaxinfer/ops/pages.py",
        "rows_ZF = jnp.where(is_new_Z1, rows_ZF, held_11ZF[0, 0])",
        "rows_ZF = jnp.where(is_new_Z1, rows_ZF, 0)",
        "tests/cache/test_paged.py::test_pages_written_one_by_one_are_those_of_a_scatter",
    ),
)
