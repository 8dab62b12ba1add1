"""Faults of the Pallas kernels: masks, edges, orders and scales."""

from tests.mutants.fault import Fault

_PREFILL = "pallas_kernels/flash_prefill/kernel.py"
_BLOCK, _ORDER, _ANCESTORS = (f"pallas_kernels/{name}.py" for name in ("block_attention", "slot_order", "ancestors"))
_TESTS = "tests/pallas_kernels"
_DECODES = f"{_TESTS}/test_flash_decode.py::test_agrees_with_the_reference"
_PREFILLS = f"{_TESTS}/test_flash_prefill.py::test_agrees_with_the_reference"
_VERIFIES = f"{_TESTS}/test_tree_verify.py::test_agrees_with_the_reference"
_GOES_AROUND = f"{_TESTS}/test_ring_decode.py::test_agrees_with_the_reference"
_READS_PAGES = f"{_TESTS}/test_paged_decode.py::test_agrees_with_the_reference"
_READS_PROMPTS = f"{_TESTS}/test_paged_prefill.py::test_agrees_with_the_reference"
_MULTIPLIES = f"{_TESTS}/test_quant_matmul.py::test_products_are_those_of_the_dequantised_weights"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "flash_prefill hides a token from itself",
        _PREFILL,
        "seen_RL, window = behind_RL >= offset,",
        "seen_RL, window = behind_RL > offset,",
        _PREFILLS,
    ),
    Fault(
        "flash_prefill's window is one too long",
        _PREFILL,
        "seen_RL &= behind_RL < offset + window",
        "seen_RL &= behind_RL <= offset + window",
        _PREFILLS,
    ),
    Fault(
        "flash_prefill forgets what came before when the largest score grows",
        _PREFILL,
        "sum_RI * _over_lanes(kept_RL, sum_RI.shape[1]) + added_RI",
        "sum_RI + added_RI",
        _PREFILLS,
    ),
    Fault(
        "flash_prefill multiplies by values past the end",
        _PREFILL,
        "index_SI < self.end - self.base - here",
        "index_SI <= self.end - self.base - here",
        _PREFILLS,
    ),
    Fault(
        "flash_prefill starts blocks that all queries see one too late for a window",
        _PREFILL,
        "cut = oldest(prefill.window, fold.first_slot + tiling.block_q - 1)",
        "cut = oldest(prefill.window, fold.first_slot - 1)",
        _PREFILLS,
    ),
    Fault(
        "the running total is not rescaled",
        _BLOCK,
        "total_RL = kept_RL * running.total_CRL[group, rows]",
        "total_RL = 1.0 * running.total_CRL[group, rows]",
        _DECODES,
    ),
    Fault(
        "a soft-cap is not scaled back",
        _BLOCK,
        "* (self.softcap * math.log2(math.e))",
        "* math.log2(math.e)",
        _DECODES,
    ),
    Fault(
        "flash_decode sees a block that ends one slot after the new token as a whole",
        _ORDER,
        "is_old = first_slot + slots <= start",
        "is_old = first_slot + slots <= start + 2",
        _DECODES,
    ),
    Fault(
        "flash_decode's window counts from the first new token for all",
        _ORDER,
        "old_RS &= slot_1S >= oldest(self.window, start + depth_of_rows(encoded_RA))",
        "old_RS &= slot_1S >= oldest(self.window, start)",
        _DECODES,
    ),
    Fault(
        "flash_decode begins a block after its window does",
        _ORDER,
        "jnp.maximum(oldest(self.window, start_B), 0) // block, last_B",
        "jnp.minimum(jnp.maximum(oldest(self.window, start_B), 0) // block + 1, last_B), last_B",
        _DECODES,
    ),
    Fault(
        "a tree's nodes see all nodes before them",
        _ANCESTORS,
        "seen_BTT = ancestors_BTT\n",
        "seen_BTT = jnp.broadcast_to(np.tri(num_tokens, dtype=bool)[None], ancestors_BTT.shape)\n",
        _VERIFIES,
    ),
    Fault(
        "a tree's window counts nodes, not depth",
        _ANCESTORS,
        "is_near_BTT = place_BT[:, None, :] >= oldest(window, place_BT)[:, :, None]",
        "is_near_BTT = (jnp.arange(num_tokens) >= oldest(window, jnp.arange(num_tokens))[:, None])[None]",
        _VERIFIES,
    ),
    Fault(
        "a ring's slot that is written next still counts as old",
        _ORDER,
        "& (held_1S >= oldest(self.window, position_R1))",
        "& (held_1S >= oldest(self.window, position_R1) - 1)",
        _GOES_AROUND,
    ),
    Fault(
        "a ring goes around all slots, sinks included",
        _ORDER,
        "return jnp.where(distance < 0, distance + self.capacity, distance)",
        "return jnp.where(distance < 0, distance + self.num_slots, distance)",
        _GOES_AROUND,
    ),
    Fault(
        "sinks meet the query of the window",
        "pallas_kernels/flash_decode/kernel.py",
        "jnp.where(slot_1L < order.num_sinks, near_RL, products_RS[:, :LANES])",
        "products_RS[:, :LANES]",
        _GOES_AROUND,
    ),
    Fault(
        "pages are looked up in the table of the first row",
        "pallas_kernels/paged_decode/kernel.py",
        "table_row * pages_per_row + block_I[step] * layout.per_block",
        "block_I[step] * layout.per_block",
        _READS_PAGES,
    ),
    Fault(
        "a token of a prompt on pages sees the slot after its own",
        _ORDER,
        "seen_RS = slot_1S <= own_R1",
        "seen_RS = slot_1S <= own_R1 + 1",
        _READS_PROMPTS,
    ),
    Fault(
        "blocks of a prompt's tokens all look at the first row's pages",
        "pallas_kernels/paged_decode/kernel.py",
        "table_row = lax.div(row_I[step], rows_per_table)",
        "table_row = lax.div(row_I[step], rows_per_table) * 0",
        _READS_PROMPTS,
    ),
    Fault(
        "a tree on pages is a chain",
        "pallas_kernels/paged_decode/op.py",
        "encode_ancestors(ancestors_BTT, tokens",
        "encode_ancestors(None, tokens",
        _READS_PAGES,
    ),
    Fault(
        "cache_write keeps the last new token out",
        "pallas_kernels/cache_write/kernel.py",
        "(token_SF < count_B[row])",
        "(token_SF < count_B[row] - 1)",
        f"{_TESTS}/test_cache_write.py::test_tokens_go_around_a_ring_and_padding_does_not",
    ),
    Fault(
        "cache_write overwrites sinks when it comes around",
        "pallas_kernels/cache_write/kernel.py",
        " & (slot_SF >= lowest_X[at])",
        "",
        f"{_TESTS}/test_cache_write.py::test_tokens_go_around_a_ring_and_padding_does_not",
    ),
    Fault(
        "the first group's scale serves a whole tile of four-bit weights",
        "pallas_kernels/quant_matmul/kernel.py",
        "scale_ref[pl.ds(tile * parts + index, 1)]",
        "scale_ref[pl.ds(tile * parts, 1)]",
        _MULTIPLIES,
    ),
    Fault(
        "the scales of int8 activations are left out",
        "pallas_kernels/quant_matmul/kernel.py",
        "out_ref[...] = (found * rows_ref[...]).astype(out_ref.dtype)",
        "out_ref[...] = found.astype(out_ref.dtype)",
        _MULTIPLIES,
    ),
    Fault(
        "the smallest scales of four bits are read as if float16 had an exponent for them",
        "pallas_kernels/quant_matmul/kernel.py",
        "jnp.where(size < 0x400,",
        "jnp.where(size < 0,",
        f"{_TESTS}/test_quant_matmul.py::test_codes_have_an_offset_and_groups_a_minimum_in_float16",
    ),
    Fault(
        "many rows' weights have the scales of the tile's first group",
        "pallas_kernels/quant_matmul/kernel.py",
        "ref[pl.ds(tile * parts + part, 1)]",
        "ref[pl.ds(tile * parts, 1)]",
        f"{_TESTS}/test_quant_matmul.py::test_codes_have_an_offset_and_groups_a_minimum_in_float16",
    ),
    Fault(
        "all heads that share lanes have the first one's scale",
        "pallas_kernels/byte_rows.py",
        "own_RS = jnp.where(row_RS >= head * self.rows_per_head, next_1S, own_RS)",
        "own_RS = jnp.where(row_RS < 0, next_1S, own_RS)",
        f"{_TESTS}/test_flash_decode.py::test_agrees_with_the_reference",
    ),
    Fault(
        "slots that nobody has written have scales",
        "pallas_kernels/byte_rows.py",
        "jnp.where(is_written_1S, lax.bitcast_convert_type(bits_KS, jnp.float32), 0.0)",
        "lax.bitcast_convert_type(bits_KS, jnp.float32)",
        f"{_TESTS}/test_flash_decode.py::test_agrees_with_the_reference",
    ),
    Fault(
        "a grouped product takes the layer's first expert's kernel for all",
        "pallas_kernels/grouped_matmul/weights.py",
        "(first[0] + experts[i], outputs[i], 0)",
        "(first[0], outputs[i], 0)",
        f"{_TESTS}/test_grouped_matmul.py::test_every_row_is_multiplied_by_its_experts_kernels",
    ),
    Fault(
        "a grouped product takes the kernels of the first layer",
        "pallas_kernels/grouped_matmul/weights.py",
        "(first[0] + experts[i], outputs[i], 0)",
        "(experts[i], outputs[i], 0)",
        f"{_TESTS}/test_grouped_matmul.py::test_every_row_is_multiplied_by_its_experts_kernels",
    ),
    Fault(
        "a grouped product's steps go by rows before outputs: a kernel is read for each block of rows",
        "pallas_kernels/grouped_matmul/op.py",
        "place_XO // same_X1, blocks_of_outputs - 1)\n    rows_XO = first_X[:, None] + place_XO % same_X1",
        "place_XO % blocks_of_outputs, blocks_of_outputs)\n"
        "    rows_XO = first_X[:, None] + place_XO // blocks_of_outputs",
        f"{_TESTS}/test_grouped_matmul.py::test_a_block_of_a_kernel_is_fetched_once_and_everything_computed_once",
    ),
    Fault(
        "a grouped product runs blocks past the count",
        "pallas_kernels/grouped_matmul/op.py",
        "steps = jnp.maximum(count, 1) * blocks_of_outputs",
        "steps = experts_X.shape[0] * blocks_of_outputs + 0 * count",
        f"{_TESTS}/test_grouped_matmul.py::test_a_block_of_a_kernel_is_fetched_once_and_everything_computed_once",
    ),
    Fault(
        "a group of weights in few bits gets the scale of the tile's first",
        "pallas_kernels/grouped_matmul/columns.py",
        "group = pl.ds(tile * task.parts + part, 1)",
        "group = pl.ds(tile * task.parts, 1)",
        f"{_TESTS}/test_grouped_few_bits.py::test_every_row_is_multiplied_by_what_its_experts_codes_stand_for",
    ),
    Fault(
        "a group of weights in few bits has no minimum",
        "pallas_kernels/grouped_matmul/columns.py",
        "            added += as_float32(ref[...])",
        "            added += 0 * as_float32(ref[...])",
        f"{_TESTS}/test_grouped_few_bits.py::test_every_row_is_multiplied_by_what_its_experts_codes_stand_for",
    ),
    Fault(
        "rows are laid out for codes once, for the first block alone",
        "pallas_kernels/grouped_matmul/columns.py",
        "(step == 0) | (rows[step] != rows[jnp.maximum(step - 1, 0)])",
        "(step == 0) | (rows[step] < 0)",
        f"{_TESTS}/test_grouped_few_bits.py::test_a_row_does_not_see_the_others_nor_where_it_lies",
    ),
    Fault(
        "a float of 4 bits without an exponent has that of 1",
        "pallas_kernels/grouped_matmul/columns.py",
        "has_exponent = (sizes + 0x01800180) & 0x02000200",
        "has_exponent = (sizes + 0x02000200) & 0x02000200",
        f"{_TESTS}/test_grouped_few_bits.py::test_every_float_of_four_bits_is_widened_exactly",
    ),
    Fault(
        "a float of 4 bits without an exponent has that of 1 where weights get their scales first",
        "pallas_kernels/grouped_matmul/columns.py",
        "jnp.where(sizes < 0x00800000, sizes << 8,",
        "jnp.where(sizes < 0x00400000, sizes << 8,",
        f"{_TESTS}/test_grouped_few_bits.py::test_every_float_of_four_bits_is_widened_exactly",
    ),
    Fault(
        "keys that are values too are read twice",
        "pallas_kernels/flash_decode/kernel.py",
        "held = [keys_LBSF] if values_LBSF is keys_LBSF else",
        "held = [keys_LBSF] if values_LBSF is None else",
        f"{_TESTS}/test_flash_decode.py::test_keys_that_are_values_too_are_read_once",
    ),
    Fault(
        "a grouped product leaves biases out",
        "pallas_kernels/grouped_matmul/kernel.py",
        "product + bias[...].astype(jnp.float32)",
        "product + 0 * bias[...].astype(jnp.float32)",
        f"{_TESTS}/test_grouped_matmul.py::test_every_row_is_multiplied_by_its_experts_kernels",
    ),
)
