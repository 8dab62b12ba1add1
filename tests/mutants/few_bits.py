"""Faults of weights in few bits: halves of bytes, scales of other rows, rows in the file's order, files of others."""

from tests.mutants.fault import Fault

_KERNELS = "jaxinfer/ops/cpu_kernels/few_bits"
_FOLDING = "tests/quantization/test_folding.py"
_SAVED = "tests/checkpoint/orbax/test_few_bits.py"
_PRODUCTS, _CHECKPOINTS = "tests/ops/test_few_bits.py", "tests/checkpoint/test_few_bits.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "every other code of a run is the high half of its byte",
        f"{_KERNELS}/tiles.py",
        "i16 {4 * (index // _HALF)}",
        "i16 {4 * (index % 2)}",
        f"{_PRODUCTS}::test_rows_times_codes_of_any_shape",
    ),
    Fault(
        "all outputs of a tile have the scale of the first",
        f"{_KERNELS}/tiles.py",
        "starts_scales[output], is_halved",
        "starts_scales[0], is_halved",
        f"{_PRODUCTS}::test_rows_times_codes_of_any_shape",
    ),
    Fault(
        "the pieces of a third matrix in few bits are counted from the second's",
        f"{_KERNELS}/product_code.py",
        "code.total(pieces[:index])",
        "code.total(pieces[: min(index, 1)])",
        f"{_PRODUCTS}::test_whatever_the_pool_does_products_are_whole_and_memory_freed",
    ),
    Fault(
        "the fifth and sixth bits of a code are those of its neighbour's byte",
        f"{_KERNELS}/tiles.py",
        "else (at % 8, 2 * (at // 8)) for at",
        "else (at // 4, 2 * (at % 4)) for at",
        f"{_PRODUCTS}::test_rows_times_codes_of_any_shape",
    ),
    Fault(
        "both groups of a run have the scale of the first",
        f"{_KERNELS}/tiles.py",
        "i32 {lane // (vectors.lanes // 2)}",
        "i32 {lane // vectors.lanes}",
        f"{_PRODUCTS}::test_rows_times_codes_of_any_shape",
    ),
    Fault(
        "the minima of K-quants are added",
        "jaxinfer/checkpoint/gguf/block_parts.py",
        "units[:, 1] ^= _NEGATIVE",
        "units[:, 1] ^= 0",
        f"{_CHECKPOINTS}::test_parts_of_blocks_have_the_values_of_the_blocks",
    ),
    Fault(
        "weights are rounded for the largest of a group, not for the farthest from zero",
        "jaxinfer/ops/few_bits/round_to_nearest.py",
        "jnp.where(-least > most, least, most)",
        "most",
        f"{_PRODUCTS}::test_weights_are_rounded_to_the_nearest_level",
    ),
    Fault(
        "rows of blocks stay in the file's order",
        "jaxinfer/checkpoint/few_bits.py",
        "to = span if rows.places is None else rows.places[span]",
        "to = span",
        f"{_CHECKPOINTS}::test_blocks_stand_for_the_weights_that_are_read_without_them",
    ),
    Fault(
        "weights in few bits are kept under the name of others",
        "jaxinfer/model_params.py",
        "layout if few_bits is None else (*layout, few_bits)",
        "layout",
        f"{_CHECKPOINTS}::test_kept_weights_are_in_few_bits_too",
    ),
    Fault(
        "GPTQ passes errors on within a block alone",
        "jaxinfer/quantization/gptq.py",
        "jnp.where(is_after_K, passed_NK, 0.0)",
        "0.0 * passed_NK",
        "tests/quantization/test_gptq.py",
    ),
    Fault(
        "GPTQ takes the inputs in their order, but the groups of the largest first",
        "jaxinfer/quantization/gptq.py",
        "order_K = jnp.argsort(-sizes_K) if by_size else jnp.arange(width)",
        "order_K = jnp.arange(width)",
        "tests/quantization/test_gptq.py",
    ),
    Fault(
        "a layer is calibrated on what the first layer reads",
        "jaxinfer/quantization/calibration.py",
        "hidden = [np.asarray(_run(alone, backend, block, each)) for each in hidden]",
        "hidden = [np.asarray(_run(alone, backend, block, each)) * 0 + each for each in hidden]",
        "tests/quantization/test_model.py",
    ),
    Fault(
        "rows in few bits are gathered in the model's order, not the checkpoint's",
        "jaxinfer/checkpoint/loaded.py",
        "whole[source.rows(count)] = part",
        "whole[:count] = part",
        f"{_SAVED}::test_kernels_are_found_in_whatever_parts_the_checkpoint_has_them",
    ),
    Fault(
        "kernels in few bits that lie the other way round are widened as they are",
        "jaxinfer/checkpoint/source.py",
        "(rows.T if source.forms()[name].is_transposed else rows)",
        "rows",
        f"{_SAVED}::test_kernels_are_found_in_whatever_parts_the_checkpoint_has_them",
    ),
    Fault(
        "a saved model forgets what it was rounded from",
        "jaxinfer/model_params.py",
        "rounded_from=trained_on() if tensors.forms() else None",
        "rounded_from=None",
        f"{_SAVED}::test_what_was_saved_loads_to_the_same_bits",
    ),
    Fault(
        "the digest leaves forms out",
        "jaxinfer/checkpoint/orbax/marker.py",
        '"tensors": tensors, **few_bits}, sort',
        '"tensors": tensors}, sort',
        f"{_SAVED}::test_forms_that_belong_to_another_folder_are_refused",
    ),
    Fault(
        "the norm before a block's two parts is divided for one of them alone",
        "jaxinfer/quantization/folding.py",
        "yield (*_QKV, *_WIDE), _norm",
        "yield _QKV, _norm",
        f"{_FOLDING}::test_scaled_inputs_change_no_logits",
    ),
    Fault(
        "values that several query heads read are divided for each",
        "jaxinfer/quantization/folding.py",
        "if config.num_heads == config.num_kv_heads:",
        "if True:",
        f"{_FOLDING}::test_scaled_inputs_change_no_logits",
    ),
    Fault(
        "a bias is not divided with its outputs",
        "jaxinfer/quantization/folding.py",
        '_as(linear["bias"], linear["bias"] / factors_N)',
        'linear["bias"]',
        f"{_FOLDING}::test_scaled_inputs_change_no_logits",
    ),
    Fault(
        "groups are cut by how much weights change, not products",
        "jaxinfer/quantization/awq.py",
        "jnp.sum(products_NGW * missed_NGW,",
        "jnp.sum(missed_NGW * missed_NGW,",
        "tests/quantization/test_awq.py::test_each_group_is_cut_where_its_products_change_least",
    ),
    Fault(
        "layers of other texts are taken for those that are done",
        "jaxinfer/model_quantization.py",
        '"texts": digest(texts.tobytes().hex())}',
        '"texts": ""}',
        "tests/quantization/test_model.py::test_an_interrupted_call_goes_on_where_it_was",
    ),
    Fault(
        "every layer multiplies by the codes of the first, where kernels read them in place",
        "jaxinfer/ops/few_bits/columns.py",
        "return leaf.at(layer) if",
        "return leaf.at(0 * layer) if",
        "tests/ops/test_columns.py::test_a_layer_of_a_stack_is_multiplied",
    ),
    Fault(
        "TPU kernels multiply without minima",
        "jaxinfer/ops/column_products.py",
        "minima=minima, offset",
        "minima=None, offset",
        "tests/ops/test_columns.py::test_a_layer_of_a_stack_is_multiplied",
    ),
    Fault(
        "a plan counts a byte for each number of four bits",
        "jaxinfer/planning/placement.py",
        "4 if dtype in (jnp.int4, jnp.uint4) else 8",
        "8",
        "tests/planning/test_few_bits.py::test_each_device_holds_its_part_of_codes_and_scales",
    ),
)
