"""Faults of features that are left out: their lists, the order of sums, which layout is read, what is counted."""

from tests.mutants.fault import Fault

_ACTIVE = "jaxinfer/ops/cpu_kernels/active"
_PRODUCTS, _TEXTS = "tests/ops/test_active_products.py", "tests/decoding/test_sparsity.py"
_BITS = f"{_PRODUCTS}::test_products_by_columns_have_the_bits_of_those_by_rows_and_read_no_more_than_they_need"
_KERNEL = "pallas_kernels/sparse_ffn"
_BLOCKS = (
    "tests/pallas_kernels/test_sparse_ffn.py::test_products_are_those_of_all_blocks_in_every_bit_and_read_the_live_ones"
)
_IN_PLACE = "tests/models/test_live_blocks.py::test_logits_are_those_of_all_features_and_dead_blocks_are_not_read"
_ORDER = "tests/models/test_unit_order.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "only the first row says which features are active",
        f"{_ACTIVE}/lists.py",
        'code.repeated("each_row", 0, "%rows", 1, (some, everything))',
        'code.repeated("each_row", 0, 1, 1, (some, everything))',
        _BITS,
    ),
    Fault(
        "a zero with a sign is active",
        f"{_ACTIVE}/lists.py",
        "_WITHOUT_SIGNS = {False: 0x7FFFFFFF, True: 0x7FFF7FFF}",
        "_WITHOUT_SIGNS = {False: -1, True: -1}",
        _BITS,
    ),
    Fault(
        "classes are added one after the other, not as lanes are",
        f"{_ACTIVE}/column_code.py",
        "zip(of_classes[::2], of_classes[1::2])",
        "zip(of_classes[: len(of_classes) // 2], of_classes[len(of_classes) // 2 :])",
        _BITS,
    ),
    Fault(
        "the sums of a second block of rows are written over the first's",
        f"{_ACTIVE}/column_code.py",
        'row = code.arithmetic("add", block.index, each_row.index)',
        'row = code.arithmetic("add", 0, each_row.index)',
        _BITS,
    ),
    Fault(
        "a zero made of underflow keeps its sign",
        f"{_ACTIVE}/column_code.py",
        "code.value(f\"and i1 {is_negative}, {code.value('xor i1 %has_all, true')}\")",
        "code.value(f\"and i1 false, {code.value('xor i1 %has_all, true')}\")",
        f"{_PRODUCTS}::test_a_zero_made_of_underflow_has_the_sign_that_it_has_with_all_terms",
    ),
    Fault(
        "outputs that nobody chose keep what was in memory",
        f"{_ACTIVE}/row_code.py",
        'with code.repeated("each_zeros", 0, rows) as each:',
        'with code.repeated("each_zeros", 1, rows) as each:',
        f"{_PRODUCTS}::test_chosen_rows_of_weights_have_the_bits_of_all_and_no_other_is_read",
    ),
    Fault(
        "a threshold itself is kept",
        "jaxinfer/ops/sparsity.py",
        "sizes <= self.amount",
        "sizes < self.amount",
        f"{_PRODUCTS}::test_thresholds_and_counts_decide_what_is_kept",
    ),
    Fault(
        "one more than K are kept",
        "jaxinfer/ops/sparsity.py",
        "keepdims=True) >= count",
        "keepdims=True) > count",
        f"{_PRODUCTS}::test_thresholds_and_counts_decide_what_is_kept",
    ),
    Fault(
        "whatever is active, features are left out",
        "jaxinfer/ops/active_products.py",
        "<= LARGEST_SHARE[products.unit_of(dtype)]",
        "<= 1.0",
        f"{_TEXTS}::test_few_active_features_pay_and_many_do_not",
    ),
    Fault(
        "a prompt reads columns too",
        "jaxinfer/models/mlp.py",
        "tokens <= MOST_ROWS",
        "tokens <= 2 * MOST_ROWS",
        f"{_TEXTS}::test_columns_are_what_a_step_reads_and_rows_what_a_prompt_reads",
    ),
    Fault(
        "a step reads rows of down as a prompt does",
        "jaxinfer/models/mlp.py",
        "project(hidden_BTF, [down], adapters_B, narrowing)",
        "project(hidden_BTF, [down], adapters_B)",
        f"{_TEXTS}::test_columns_are_what_a_step_reads_and_rows_what_a_prompt_reads",
    ),
    Fault(
        "the first feature is never active for up",
        "jaxinfer/models/mlp.py",
        "partial(widening, active=hidden_BTF)",
        "partial(widening, active=hidden_BTF * (jnp.arange(hidden_BTF.shape[2]) > 0))",
        f"{_TEXTS}::test_with_a_gate_texts_are_those_of_all_features",
    ),
    Fault(
        "a model without zeros has exact sparsity",
        "jaxinfer/model_sparsity.py",
        'sparsity.kind == "exact" and config.activation',
        "sparsity.kind == sparsity.name and not config.activation",
        f"{_TEXTS}::test_what_has_no_sparsity_is_refused_in_one_line",
    ),
    Fault(
        "weights in few bits are read before sparsity is refused",
        "jaxinfer/model_params.py",
        "    check_stored(checkpoint, names, config, backend, partitioner, reader)\n",
        "",
        f"{_TEXTS}::test_a_folder_in_few_bits_is_refused_before_its_weights_are_read",
    ),
    Fault(
        "infinite weights of down are not looked for",
        "jaxinfer/model_sparsity.py",
        'for part in {"up", "down"} & mlp.keys():',
        'for part in {"up"} & mlp.keys():',
        f"{_TEXTS}::test_what_has_no_sparsity_is_refused_in_one_line",
    ),
    Fault(
        "an entry past the end of the list is multiplied too",
        f"{_KERNEL}/kernel.py",
        """            @pl.when(entry < count_ref[0])
            def _(entry: Any = entry, hidden_ref""",
        """            @pl.when(entry <= count_ref[0])
            def _(entry: Any = entry, hidden_ref""",
        _BLOCKS,
    ),
    Fault(
        "what lies past the last hidden unit is multiplied",
        f"{_KERNEL}/kernel.py",
        "in_last = units % UNITS",
        "in_last = 0",
        _BLOCKS,
    ),
    Fault(
        "a sum that underflows keeps its sign",
        f"{_KERNEL}/kernel.py",
        "jnp.where(total == 0, 0.0, total)",
        "total",
        "tests/pallas_kernels/test_sparse_ffn.py"
        "::test_a_sum_that_underflows_has_the_sign_that_it_has_with_blocks_of_zeros",
    ),
    Fault(
        "steps read blocks of the first layer",
        "jaxinfer/models/layer_stack.py",
        "LayerView(leaf, layer)",
        "LayerView(leaf, layer * 0)",
        _IN_PLACE,
    ),
    Fault(
        "up is multiplied whole before it is known what is live",
        "jaxinfer/models/mlp.py",
        "return live_inputs, live_outputs",
        "return live_inputs, None",
        _IN_PLACE,
    ),
    Fault(
        "the units of a block are those that are active most often",
        "jaxinfer/models/unit_order.py",
        "if union_T.any() else sizes_F",
        "if not len(union_T) else sizes_F",
        f"{_ORDER}::test_units_that_are_active_together_share_blocks",
    ),
    Fault(
        "one device gets all units that are active often",
        "jaxinfer/models/unit_order.py",
        "for start in range(0, own, UNITS) for part in range(parts)",
        "for part in range(parts) for start in range(0, own, UNITS)",
        f"{_ORDER}::test_parts_of_a_mesh_have_as_many_live_blocks_each",
    ),
    Fault(
        "the columns of down keep their order",
        "jaxinfer/models/unit_order.py",
        'layer not in ("gate", "up", "down")',
        'layer not in ("gate", "up")',
        f"{_ORDER}::test_a_model_in_another_order_says_the_same_and_has_fewer_live_blocks",
    ),
    Fault(
        "a layer that reads everything is said to leave weights out",
        "jaxinfer/bench/sparsity/measure.py",
        "share if share <= most else 1.0",
        "share",
        "tests/bench/test_sparsity.py::test_weights_are_not_read_where_leaving_them_out_pays",
    ),
    Fault(
        "a plan takes a gate's weights for ones that a sparse step leaves out",
        "jaxinfer/planning/footprint.py",
        'for part in (("up", "down") if "gate" in mlp else ("down",))',
        'for part in (("gate", "down") if "gate" in mlp else ("up", "down"))',
        "tests/planning/test_live_blocks.py::test_a_step_reads_the_live_share_of_up_and_down_or_of_down_alone",
    ),
    Fault(
        "programs are compiled for a sparsity that loading refuses",
        "jaxinfer/planning/compile.py",
        "    check_sparsity(config, split.backend, mesh.abstract, few_bits)\n",
        "",
        "tests/planning/test_live_blocks.py::test_plans_and_programs_refuse_what_loading_refuses",
    ),
)
