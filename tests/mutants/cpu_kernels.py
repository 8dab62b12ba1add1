"""Faults of the CPU's own kernels: tails of tiles, orders of adding, chunks that are joined, hidden slots, ties."""

from tests.mutants.fault import Fault

_FOLDER = "jaxinfer/ops/cpu_kernels"
_NORMS = "tests/ops/test_cpu_norms.py"
_PRODUCTS, _ATTENTION = "tests/ops/test_cpu_products.py", "tests/ops/test_cpu_attention.py"
_PROCESSOR = "tests/ops/test_processor.py"
_UNIT = "tests/ops/test_matrix_unit.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "after a narrow tile as many outputs are passed over as a wide one has",
        f"{_FOLDER}/product_code.py",
        'code.repeated(f"each_{name}", start, end, outputs, ("ptr", place))',
        'code.repeated(f"each_{name}", start, end, OUTPUTS, ("ptr", place))',
        f"{_PRODUCTS}::test_rows_times_weights_of_any_shape",
    ),
    Fault(
        "the pieces of a third matrix are counted from the second's",
        f"{_FOLDER}/product_code.py",
        "code.total(pieces[:index])",
        "code.total(pieces[: min(index, 1)])",
        f"{_PRODUCTS}::test_whatever_the_pool_does_products_are_whole_and_records_freed",
    ),
    Fault(
        "a part of a row is looked for where the first is",
        f"{_FOLDER}/product_code.py",
        'code.arithmetic("mul", group, length))',
        'code.arithmetic("mul", group, 0))',
        f"{_PRODUCTS}::test_rows_times_weights_of_any_shape",
    ),
    Fault(
        "a negative layer is the first",
        f"{_FOLDER}/handlers.py",
        'layer = code.value(f"select i1 {is_negative}, i64 {from_end}, i64 {layer}")',
        'layer = code.value(f"select i1 {is_negative}, i64 0, i64 {layer}")',
        f"{_PRODUCTS}::test_a_layer_is_counted_as_jax_counts_it",
    ),
    Fault(
        "an error of the pool is not counted as a thread that does not come",
        f"{_FOLDER}/handlers.py",
        'code.value(f"atomicrmw sub ptr {users_left}, i64 {refused} monotonic")',
        'code.value(f"atomicrmw sub ptr {users_left}, i64 0 monotonic")',
        f"{_PRODUCTS}::test_whatever_the_pool_does_products_are_whole_and_records_freed",
    ),
    Fault(
        "a tile of many rows rounds products before it adds them",
        f"{_FOLDER}/dot_tiles.py",
        "self._vectors.multiply_add(self._code, one, other, to, name)",
        "first = to if self._rows < 5 else 'zeroinitializer'\n"
        "            last = self._vectors.multiply_add(self._code, one, other, first, name if first == to else None)\n"
        "            first == to or self._code.value(f'fadd {wide} {last}, {to}', name)",
        f"{_PRODUCTS}::test_a_row_has_the_same_results_among_any_number_of_others",
    ),
    Fault(
        "the last number of a row that fills no vector is left out",
        f"{_FOLDER}/dot_tiles.py",
        'code.branch(code.value(f"icmp sgt i64 {left}, 0"), "tail", "done")',
        'code.branch(code.value(f"icmp sgt i64 {left}, 1"), "tail", "done")',
        f"{_PRODUCTS}::test_rows_times_weights_of_any_shape",
    ),
    Fault(
        "a row's last numbers are multiplied with those of the next row, too",
        f"{_FOLDER}/dot_tiles.py",
        "whole, self._vectors.first(code, step, left))",
        "whole, None)",
        f"{_PRODUCTS}::test_rows_times_weights_of_any_shape",
    ),
    Fault(
        "a tile goes on from the sums of the tile before it",
        f"{_FOLDER}/product_code.py",
        'each.left = code.at("float", each.held, size)',
        "each.left = each.held",
        f"{_PRODUCTS}::test_a_row_has_the_same_results_among_any_number_of_others",
    ),
    Fault(
        "hidden scores are added to, not replaced",
        f"{_FOLDER}/softmax_code.py",
        ', {wide} {lowest}"',
        """, {wide} {code.value(f'fadd {wide} {code.load(wide, place, 4)}, {lowest}')}\"""",
        f"{_ATTENTION}::test_hidden_keys_count_for_nothing_whatever_they_are",
    ),
    Fault(
        "the greatest score is looked for among hidden slots, too",
        f"{_FOLDER}/softmax_code.py",
        'code.effect(f"store {wide} {score}, ptr {place}, align 4")',
        "unmasked = code.load(wide, place, 4)\n"
        "        code.effect(f'store {wide} {score}, ptr {place}, align 4')\n"
        "        score = unmasked",
        f"{_ATTENTION}::test_what_lies_between_the_slots_that_a_query_sees_changes_no_bit",
    ),
    Fault(
        "scores have no bound",
        f"{_FOLDER}/softmax_code.py",
        '"fcmp one float %softcap, 0.0"',
        '"fcmp false float %softcap, 0.0"',
        f"{_ATTENTION}::test_attention_of_any_shape",
    ),
    Fault(
        "what lies past the last slot that is seen is added up",
        f"{_FOLDER}/attention_code.py",
        'code.smaller(end, "%last")',
        'code.smaller(end, code.larger("%last", ring_end))',
        f"{_ATTENTION}::test_attention_of_any_shape",
    ),
    Fault(
        "every block of rows sees what the first tokens see",
        f"{_FOLDER}/attention_code.py",
        'begin = code.arithmetic("srem", "%row", tokens)',
        'begin = "0"',
        f"{_ATTENTION}::test_attention_of_any_shape",
    ),
    Fault(
        "values of a ring are added up as its slots stand",
        f"{_FOLDER}/attention_code.py",
        "(turn, ring_end), (near_slots, turn),",
        "(near_slots, turn), (turn, ring_end),",
        f"{_ATTENTION}::test_a_ring_changes_no_bit_wherever_it_begins",
    ),
    Fault(
        "sinks are compared with the queries of the ring",
        f"{_FOLDER}/attention_code.py",
        'query = code.at("float", _RECORD.pointer(code, name),',
        "query = code.at(\"float\", _RECORD.pointer(code, 'q'),",
        f"{_ATTENTION}::test_a_ring_changes_no_bit_wherever_it_begins",
    ),
    Fault(
        "each chunk's values are added up before they are added to others",
        f"{_FOLDER}/weighted_sums.py",
        'vectors.multiply_add(code, part, factors, f"%old{index}", f"%sum{index}")',
        "own = code.value(f'fsub {wide} %old{index}, {sums[index]}')\n"
        "            own = vectors.multiply_add(code, part, factors, own)\n"
        "            code.value(f'fadd {wide} {sums[index]}, {own}', f'%sum{index}')",
        f"{_ATTENTION}::test_what_lies_between_the_slots_that_a_query_sees_changes_no_bit",
    ),
    Fault(
        "each chunk's weights are counted anew",
        f"{_FOLDER}/weighted_sums.py",
        'totals = [code.load(wide, code.at("float", "%totals", lanes * row), 4) for row in range(rows)]',
        'totals = ["zeroinitializer"] * rows',
        f"{_ATTENTION}::test_attention_of_any_shape",
    ),
    Fault(
        "weighted sums of few rows round products before they add them",
        f"{_FOLDER}/weighted_sums.py",
        'vectors.multiply_add(code, part, factors, f"%old{index}", f"%sum{index}")',
        "one = code.value(f'fmul {wide} {part}, {factors}') if rows < tile_rows(vectors) else None\n"
        "            one and code.value(f'fadd {wide} {one}, %old{index}', f'%sum{index}')\n"
        "            one or vectors.multiply_add(code, part, factors, f'%old{index}', f'%sum{index}')",
        f"{_ATTENTION}::test_a_query_has_the_same_bits_among_any_others_and_in_a_longer_cache",
    ),
    Fault(
        "the last of equals is the best",
        f"{_FOLDER}/best.py",
        'code.value(f"fcmp ogt float {one}, {other}")',
        'code.value(f"fcmp oge float {one}, {other}")',
        "tests/sampling/test_draw.py::test_the_best_token_is_the_first_of_the_highest_in_any_vocabulary",
    ),
    Fault(
        "a row that is no whole number of vectors loses its last numbers",
        f"{_FOLDER}/best.py",
        'last = code.arithmetic("sub", length, lanes)',
        'last = code.arithmetic("and", code.arithmetic("sub", length, lanes), -lanes)',
        "tests/ops/test_cpu_kernels.py::test_whatever_the_pool_does_the_best_are_found_and_records_freed",
    ),
    Fault(
        "a row that is no whole number of vectors is normed without its last numbers",
        f"{_FOLDER}/lanes.py",
        "return visit(whole, each.held, mask)",
        "return each.held",
        f"{_NORMS}::test_whatever_the_pool_does_rows_are_normed_and_records_freed",
    ),
    Fault(
        "lanes past a row's end count in its variance",
        f"{_FOLDER}/norms.py",
        'return masked(code, code.value(f"fsub {WIDE} {part}, {mean}"), mask) if is_layer_norm else part',
        'return code.value(f"fsub {WIDE} {part}, {mean}") if is_layer_norm else part',
        f"{_NORMS}::test_whatever_the_pool_does_rows_are_normed_and_records_freed",
    ),
    Fault(
        "products and sums of a norm are rounded once",
        f"{_FOLDER}/norms.py",
        """return code.value(f"fadd {WIDE} {held}, {code.value(f'fmul {WIDE} {part}, {part}')}")""",
        """return code.value(f"fadd contract {WIDE} {held}, {code.value(f'fmul contract {WIDE} {part}, {part}')}")""",
        f"{_NORMS}::test_numbers_are_added_in_the_order_that_is_written_down",
    ),
    Fault(
        "a CPU's norms are left to XLA",
        "jaxinfer/models/norm.py",
        "has_kernel = self.backend.cpu_kernels and",
        "has_kernel = self.backend.cpu_kernels and False and",
        f"{_NORMS}::test_a_models_norm_keeps_a_rows_bits_whatever_is_computed_around_it",
    ),
    Fault(
        "masses below a threshold count",
        f"{_FOLDER}/masses.py",
        "masses = masked(code, masked(code, masses, counts), mask)",
        "masses = masked(code, masses, mask)",
        "tests/sampling/test_mass.py::test_whatever_the_pool_does_masses_are_added_up_and_records_freed",
    ),
    Fault(
        "a logit of minus infinity has a mass",
        f"{_FOLDER}/masses.py",
        '("olt", _LOWEST)',
        '("olt", -1e30)',
        "tests/sampling/test_mass.py::test_exponentials_of_all_powers",
    ),
    Fault(
        "sums over a vocabulary are left to XLA",
        "jaxinfer/sampling/mass.py",
        "return backend.cpu_kernels and",
        "return backend.cpu_kernels and False and",
        "tests/sampling/test_mass.py::test_what_is_said_of_a_row_does_not_depend_on_its_batch_or_tree",
    ),
    Fault(
        "an id outside a table reads past its end",
        f"{_FOLDER}/rows.py",
        'line = code.larger(code.smaller(line, code.arithmetic("sub", lines, 1)), 0)',
        'line = code.larger(code.smaller(line, code.arithmetic("sub", lines, 2)), 0)',
        "tests/ops/test_cpu_kernels.py::test_rows_of_a_table_are_taken_where_they_lie",
    ),
    Fault(
        "with many rows in the matrix unit, numbers are added from the last to the first",
        f"{_FOLDER}/matrix_unit_code.py",
        'with code.repeated("step", 0, "%length", _NUMBERS) as step:\n        packed =',
        'with code.repeated("step", 0, "%length", _NUMBERS) as one:\n'
        '        last = code.arithmetic("sub", "%length", _NUMBERS)\n'
        '        step = one if rows == 1 else type(one)(code.arithmetic("sub", last, one.index), "", "")\n'
        "        packed =",
        f"{_UNIT}::test_a_row_has_the_same_bits_among_any_number_of_others",
    ),
    Fault(
        "few rows are left to the processor's vectors",
        f"{_FOLDER}/products.py",
        "if vectors is not None and vectors.tiles(dtype, numbers):",
        "if vectors is not None and count > 16 and vectors.tiles(dtype, numbers):",
        f"{_UNIT}::test_the_length_of_rows_alone_chooses_the_unit",
    ),
    Fault(
        "of a last, narrow tile of sums one output too many is written",
        f"{_FOLDER}/matrix_unit_code.py",
        'code.repeated("output", 0, "%outputs") as output',
        'code.repeated("output", 0, code.arithmetic("add", "%outputs", 1)) as output',
        f"{_UNIT}::test_products_of_any_shape",
    ),
    Fault(
        "a narrow tile of weights is read as a whole one",
        f"{_FOLDER}/matrix_unit_code.py",
        'code.effect(f"call void @configure(i64 {left})")',
        'code.effect(f"call void @configure(i64 {_LINES})")',
        f"{_UNIT}::test_nothing_is_read_past_the_end",
    ),
    Fault(
        "rows that a tile lacks are read",
        f"{_FOLDER}/matrix_unit_code.py",
        'count = code.smaller(code.arithmetic("sub", rows, first), _LINES)',
        "count = _LINES",
        f"{_UNIT}::test_nothing_is_read_past_the_end",
    ),
    Fault(
        "each part of the rows is written where the first is",
        f"{_FOLDER}/matrix_unit_code.py",
        'this_y = code.at("float", all_y, code.arithmetic("mul", row, outputs))',
        "this_y = all_y",
        f"{_UNIT}::test_rows_that_no_cache_holds_are_taken_in_parts",
    ),
    Fault(
        "rows are multiplied before all are packed",
        f"{_FOLDER}/matrix_unit_code.py",
        'wait_for(code, "%record", packs, pause, "packs")',
        'wait_for(code, "%record", "0", pause, "packs")',
        f"{_UNIT}::test_rows_are_multiplied_once_they_are_packed",
    ),
    Fault(
        "a matrix unit is used though Linux refuses it",
        f"{_FOLDER}/machine_code.py",
        "vectors.tiles_bfloat16 and not _may_use_tiles()",
        "vectors.tiles_bfloat16 and not (_may_use_tiles() or True)",
        f"{_UNIT}::test_a_process_that_may_not_use_the_unit_does_without",
    ),
    Fault(
        "all slots of a chunk but the first have the scale of the one before",
        f"{_FOLDER}/slot_bytes.py",
        'code.store_at("float", scale, "%scales", slot.index)',
        'code.store_at("float", scale, "%scales", code.arithmetic("add", slot.index, 1))',
        "tests/ops/test_cpu_attention.py::test_rows_in_bytes_are_read_as_the_numbers_that_they_stand_for",
    ),
    Fault(
        "floats of 8 bits lose their last bit",
        f"{_FOLDER}/slot_bytes.py",
        "constant(0x3F80)",
        "constant(0x3F00)",
        "tests/ops/test_cpu_attention.py::test_rows_in_bytes_are_read_as_the_numbers_that_they_stand_for",
    ),
    Fault(
        "of a table's parts, the first has the places of the second",
        f"{_FOLDER}/lookups.py",
        "{floats} {upper}, {floats} {lower}",
        "{floats} {lower}, {floats} {upper}",
        f"{_PROCESSOR}::test_numbers_are_those_at_their_places",
    ),
    Fault(
        "every pair of a table's parts is told apart by the same bit",
        f"{_FOLDER}/lookups.py",
        "        bit += 1\n",
        "",
        f"{_PROCESSOR}::test_numbers_are_those_at_their_places",
    ),
    Fault(
        "a limit leaves out its own instructions alone",
        f"{_FOLDER}/processor.py",
        "names[names.index(limit.lower()) :]",
        "(limit.lower(),)",
        f"{_PROCESSOR}::test_a_limit_leaves_out_what_is_above_it",
    ),
    Fault(
        "kernels use instructions that XLA may not",
        f"{_FOLDER}/machine_code.py",
        "describe_vectors(llvm.get_process_triple(), host_features())",
        "describe_vectors(llvm.get_process_triple(), llvm.get_host_cpu_features())",
        f"{_PROCESSOR}::test_our_code_keeps_to_the_instructions_that_xla_may_use",
    ),
)
