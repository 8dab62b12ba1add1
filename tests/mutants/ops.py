"""Faults of operations: attention, its masks and joins, rounding, the best of rows, and who computes what."""

from tests.mutants.fault import Fault

_ATTENTION, _RING = "jaxinfer/ops/attention.py", "jaxinfer/ops/ring_attention.py"
_SPLIT = "tests/ops/test_split_sequences.py"
_AROUND = f"{_SPLIT}::test_a_prompt_around_a_ring_is_attended_to_and_written_in_its_order"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "the CPU's own attention is not scaled",
        _ATTENTION,
        "query_BTNH.astype(jnp.float32) * scale,",
        "query_BTNH.astype(jnp.float32),",
        "tests/ops/test_cpu_attention.py::test_attention_is_that_of_xla",
    ),
    Fault(
        "a soft-cap is not divided by",
        _ATTENTION,
        "scores_BCRTS = softcap * jnp.tanh(scores_BCRTS / softcap)",
        "scores_BCRTS = softcap * jnp.tanh(scores_BCRTS)",
        "tests/ops/test_attention.py::test_attention_equals_a_softmax_over_the_seen_slots",
    ),
    Fault(
        "heads that share a product mix their values",
        _ATTENTION,
        'jnp.einsum("btcjgjh->btcjgh", output)',
        'jnp.einsum("btcjgih->btcjgh", output)',
        "tests/ops/test_joined_heads.py::test_heads_that_share_a_product_attend_as_each_by_itself",
    ),
    Fault(
        "parts are joined without their log-sum-exp",
        "jaxinfer/ops/split_slots.py",
        "largest_BTN = lax.pmax(partial.largest_BTN, axis)",
        "largest_BTN = partial.largest_BTN",
        f"{_SPLIT}::test_parts_of_the_slots_join_to_attention_to_all",
    ),
    Fault(
        "a part's total keeps its own greatest score",
        _ATTENTION,
        "largest_BTN, self.totals_BTN * factor_BTN)",
        "largest_BTN, self.totals_BTN)",
        f"{_SPLIT}::test_parts_of_the_slots_join_to_attention_to_all",
    ),
    Fault(
        "the ring turns the other way than its parts are counted",
        _RING,
        "[lax.axis_index(SEQUENCE)] - turn) % self.num_devices]",
        "[lax.axis_index(SEQUENCE)] + turn) % self.num_devices]",
        _AROUND,
    ),
    Fault(
        "a device's front part attends to later devices'",
        _RING,
        "is_before = origin < place",
        "is_before = origin <= place",
        _AROUND,
    ),
    Fault(
        "a window forgets how far a part of the ring is behind",
        _RING,
        "in_window(query_1T, key_1T, self.window)",
        "in_window(query_1T - distance, key_1T, self.window)",
        _AROUND,
    ),
    Fault(
        "a new token sees its siblings",
        "jaxinfer/ops/masks.py",
        "return old_BTS | (is_new_BS[:, None, :] & seen_BTS)",
        "return old_BTS | (is_new_BS[:, None, :] & (index_B1S >= 0))",
        "tests/ops/test_attention.py::test_visible_slots_are_the_committed_ones_and_the_ancestors",
    ),
    Fault(
        "a negative id wraps around the embedding table",
        "jaxinfer/ops/embedding.py",
        "ids = jnp.clip(tokens_BT, 0, table_VD.shape[0] - 1)",
        "ids = jnp.minimum(tokens_BT, table_VD.shape[0] - 1)",
        "tests/ops/test_attention.py::test_embeddings_are_rows_of_the_table",
    ),
    Fault(
        "heads that only draft keep their output matrices as they are",
        "jaxinfer/models/drafters/four_bits.py",
        'in_four_bits(part["output"]["kernel"], backend)}',
        'part["output"]["kernel"]}',
        "tests/models/drafters/test_four_bits.py::test_matrices_of_heads_are_rounded_where_the_kernels_are",
    ),
    Fault(
        "heads are rounded where nothing multiplies them in four bits",
        "jaxinfer/models/drafters/four_bits.py",
        "if not backend.cpu_kernels or ",
        "if ",
        "tests/models/drafters/test_four_bits.py::test_matrices_of_heads_are_rounded_where_the_kernels_are",
    ),
    Fault(
        "blocks of equal maxima lose their order",
        "jaxinfer/ops/top_k.py",
        "jnp.sort(lax.top_k(jnp.max(blocks, axis=-1), count)[1], axis=-1)",
        "lax.top_k(jnp.max(blocks, axis=-1), count)[1]",
        "tests/ops/test_top_k.py::test_long_rows_have_the_same_best_in_the_same_order",
    ),
    Fault(
        "a TPU has no kernels unless asked",
        "jaxinfer/ops/backend.py",
        'kernels=kernels or ("pallas" if platform == "tpu" else "xla")',
        'kernels=kernels or "xla"',
        "tests/ops/test_cache_attention.py::test_a_tpu_attends_by_kernels_and_others_by_xla",
    ),
    Fault(
        "kernels are asked to read caches that lie in another order",
        "jaxinfer/ops/kernel_choice.py",
        "keys_LBSF.shape[-1] // backend.kv_shards % _LANES == 0",
        "keys_LBSF.shape[-1] % _LANES == 0",
        "tests/ops/test_cache_attention.py::test_kernels_run_on_each_device_of_a_mesh",
    ),
    Fault(
        "a product is rounded together with what is added to it",
        "jaxinfer/ops/rounding.py",
        "return jnp.clip(products, -largest, largest)",
        "return products",
        "tests/ops/test_rounding.py::test_a_rounded_product_is_added_to_as_if_it_was_stored",
    ),
    Fault(
        "tempered logits are rounded together with the noise",
        "jaxinfer/sampling/transforms.py",
        "jnp.where(jnp.isfinite(logits_BMV), logits_BMV / divisor_B[:, None, None], logits_BMV)",
        "logits_BMV / divisor_B[:, None, None]",
        "tests/ops/test_rounding.py::test_noise_has_the_same_bits_with_all_that_goes_around",
    ),
    Fault(
        "windows of trees in several passes are a token too wide",
        "jaxinfer/ops/masks.py",
        "depth_BTA >= oldest(window, position_BT)[..., None]",
        "depth_BTA >= oldest(window, position_BT)[..., None] - 1",
        "tests/ops/test_attention.py::test_the_last_tokens_of_a_tree_see_what_they_see_in_a_pass_over_all_of_it[2]",
    ),
    Fault(
        "a branch of a condition writes to a copy of the cache",
        "jaxinfer/decoding/step.py",
        "one_of(has_draft, run_tree, run_roots, state.cache)",
        "jax.lax.cond(has_draft, run_tree, run_roots, state.cache)",
        "tests/decoding/programs/test_in_place.py::test_a_step_writes_to_the_cache_in_place",
    ),
    Fault(
        "a window of all rows takes a copy of the drafter's memory",
        "jaxinfer/engine/programs.py",
        "takes_all = len(slots_B) == num_rows(rows.state, axes.state)",
        "takes_all = False",
        "tests/decoding/programs/test_in_place.py::test_a_window_of_all_rows_copies_neither_pages_nor_memory",
    ),
    Fault(
        "a window of all rows reports in the order of the rows",
        "jaxinfer/engine/programs.py",
        "lambda leaf: leaf[slots_B] if leaf.ndim else leaf",
        "lambda leaf: leaf",
        "tests/engine/test_law.py::test_load_changes_no_bit",
    ),
    Fault(
        "a window of all rows reads pages in the order of its requests",
        "jaxinfer/engine/programs.py",
        "table_BX, runs_B = table_BX[place_B], runs_B[place_B]",
        "runs_B = runs_B[place_B]",
        "tests/engine/test_law.py::test_load_changes_no_bit",
    ),
)
