"""Faults of loaded adapters: what is read of them, whose rows they are, and what may share pages."""

from tests.mutants.fault import Fault

_KERNELS, _OPS = "jaxinfer/ops/cpu_kernels/low_rank.py", "jaxinfer/ops/low_rank.py"
_LOADED, _LINEAR = "jaxinfer/model_adapters.py", "jaxinfer/models/linear.py"
_FOLDER, _SETTINGS = (f"jaxinfer/checkpoint/adapters/{name}.py" for name in ("peft_folder", "settings"))
_OF_OPS, _OF_FOLDERS = "tests/ops/test_low_rank.py", "tests/checkpoint/adapters/test_peft_folder.py"
_ROWS = "tests/decoding/test_adapters.py"
_BITS = f"{_ROWS}::test_a_row_has_the_bits_that_it_has_alone_and_without_an_adapter_those_of_the_model"

_STACKS, _PARTS = "jaxinfer/adapter_stacks.py", "jaxinfer/adapter_parts.py"
_TABLES, _NORM = "jaxinfer/models/own_tables.py", "jaxinfer/models/norm.py"
_PLACE, _OF_PLACES = "jaxinfer/checkpoint/adapters/place.py", "tests/checkpoint/adapters/test_place.py"
_OF_PREFIXES = "tests/engine/test_adapters.py::test_a_prefix_is_computed_with_its_adapter"
_OF_TABLES = "tests/models/test_own_tables.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "every row reads the first row's pair",
        _KERNELS,
        "code.load_at('i32', ids, item)",
        "code.load_at('i32', ids, 0)",
        _OF_OPS,
    ),
    Fault(
        "several stacks are read as the first",
        _KERNELS,
        'numbers |= {f"{name}{index}": value for name, value in zip(OF_MATRIX[2:], values)}',
        "numbers |= {f\"{name}{index}\": value for name, value in zip(OF_MATRIX[2:], (*values[:3], '0'))}",
        f"{_OF_OPS}::test_several_stacks_are_read_in_one_call",
    ),
    Fault(
        "columns past the first piece keep the base",
        _KERNELS,
        'of_w = code.arithmetic("add", code.arithmetic("mul", chosen, code.arithmetic("mul", rank, outputs)), first)',
        'of_w = code.arithmetic("mul", chosen, code.arithmetic("mul", rank, outputs))',
        f"{_OF_OPS}::test_many_tokens_and_columns_are_cut_into_pieces",
    ),
    Fault(
        "where there are no kernels rows get all adapters",
        _OPS,
        "own = jnp.where(is_own_BN[:, None, :, None], every.reshape(*every.shape[:-1], num, rank), 0)",
        "own = every.reshape(*every.shape[:-1], num, rank)",
        _OF_OPS,
    ),
    Fault(
        "where there are no kernels rows without an adapter are added to",
        _OPS,
        "return jnp.where((ids_B < 0)[:, None, None], base_BTO, (base_BTO + added_BTO).astype(base_BTO.dtype))",
        "return (base_BTO + added_BTO + 1e-6).astype(base_BTO.dtype)",
        _OF_OPS,
    ),
    Fault("adapters are one off", _LINEAR, "adapters_B - 1, split", "adapters_B - 2, split", _BITS),
    Fault(
        "a gain is a row's that has none",
        _LINEAR,
        "base = jnp.where((ids_B < 0)[:, None, None], output, scaled)",
        "base = scaled",
        _BITS,
    ),
    Fault(
        "a number that is free is given to two",
        _LOADED,
        "number = next(number for number in range(1, len(taken) + 2) if number not in taken)",
        "number = len(taken) + 1",
        f"{_ROWS}::test_a_number_that_is_free_again_is_another_adapters",
    ),
    Fault(
        "every adapter has a size of its own",
        _STACKS,
        "number = _power_of_two(max(each.number for each in loaded))",
        "number = max(each.number for each in loaded)",
        f"{_ROWS}::test_loading_and_unloading_compile_nothing_within_a_size_and_texts_go_on",
    ),
    Fault(
        "an adapter that is loaded changes what runs",
        _LOADED,
        "        self._loaded = left\n        self.params = self._stacked()",
        "        self._loaded = left",
        f"{_ROWS}::test_a_number_that_is_free_again_is_another_adapters",
    ),
    Fault(
        "the strength of an adapter is left out",
        _FOLDER,
        "LowRank(down, up * scale, magnitude",
        "LowRank(down, up, magnitude",
        _OF_FOLDERS,
    ),
    Fault(
        "what an adapter lacks is not missed",
        _FOLDER,
        "    _check_targets(path, settings, found, places)\n",
        "",
        _OF_FOLDERS,
    ),
    Fault(
        "rsLoRA is scaled as LoRA",
        _SETTINGS,
        "alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank",
        "alpha / rank",
        _OF_FOLDERS,
    ),
    Fault(
        "layers that an adapter leaves out are targets",
        _SETTINGS,
        "match is not None and int(match[1]) in layers",
        "match is not None",
        _OF_FOLDERS,
    ),
    Fault("an adapter that changes the base is read", _SETTINGS, '"gaussian", "orthogonal"', '"pissa"', _OF_FOLDERS),
    Fault(
        "a magnitude is not followed",
        "jaxinfer/checkpoint/adapters/low_rank.py",
        "return wide if self.magnitude_O is None else wide * self.gain(kernel_OI)[:, None]",
        "return wide",
        _OF_FOLDERS,
    ),
    Fault(
        "adapters share cached pages",
        "jaxinfer/engine/core.py",
        "return f\"{regime}{f';{adapter}' if adapter else ''}/{cache_salt}\"",
        'return f"{regime}/{cache_salt}"',
        "tests/engine/test_adapters.py::test_what_pages_depend_on_tells_adapters_apart",
    ),
    Fault(
        "a request for an adapter is the model's",
        "jaxinfer/server/api/sampling.py",
        "return None if name == limits.model else name",
        "return None",
        "tests/server/test_adapters.py::test_the_name_of_the_model_chooses_the_adapter",
    ),
    Fault(
        "a saved adapter has its rows in the order of its parameters alone",
        "train/model/lora.py",
        'names = family_of({"model_type": config.family}).tensor_names(config)',
        'names = family_of({"model_type": "llama"}).tensor_names(config)',
        "tests/train/model/test_lora.py::test_saved_adapters_do_loaded_what_they_did",
    ),
    Fault(
        "answers of an adapter have the model's fingerprint",
        "jaxinfer/server/fingerprint.py",
        "[] if adapter is None else [lm.loaded_adapters.fingerprint(adapter)]",
        "[]",
        "tests/server/test_adapters.py::test_a_fingerprint_names_all_that_decides_an_answer",
    ),
    Fault(
        "a fingerprint does not say what is rounded or left out",
        "jaxinfer/server/fingerprint.py",
        "changed.items() if how is not None]",
        "changed.items() if how == '']",
        "tests/server/test_adapters.py::test_a_fingerprint_names_all_that_decides_an_answer",
    ),
    Fault(
        "tokens past a row's own take rows of tables",
        _TABLES,
        "rows_BTD = jnp.where(is_it_BTK.any(axis=-1, keepdims=True), found_BTD, rows_BTD)",
        "rows_BTD = found_BTD",
        _OF_TABLES,
    ),
    Fault(
        "logits of tokens without a row are replaced",
        _TABLES,
        "(ids_B[:, None] < 0) | (tokens_BK < 0)",
        "(ids_B[:, None] < 0) & (tokens_BK < 0)",
        _OF_TABLES,
    ),
    Fault(
        "a whole table is another adapter's",
        _TABLES,
        "return [(copy_B == int(number)",
        "return [(copy_B <= int(number)",
        _OF_TABLES,
    ),
    Fault(
        "a low rank of an embedding is the first adapter's",
        _TABLES,
        "ranks_NVR[numbers_B[:, None], jnp.clip",
        "ranks_NVR[0 * numbers_B[:, None], jnp.clip",
        _OF_TABLES,
    ),
    Fault(
        "what an adapter adds to an output is left out",
        _LINEAR,
        "return jnp.where((ids_B < 0)[:, None, None], outputs_BTO, moved)",
        "return outputs_BTO",
        _OF_TABLES,
    ),
    Fault(
        "a norm's own weights are another adapter's",
        _NORM,
        "rows = jnp.take(loaded[name], jnp.maximum(ids_B, 0), axis=0)",
        "rows = jnp.take(loaded[name], jnp.maximum(ids_B, 0) + 1, axis=0)",
        f"{_ROWS}::test_an_adapter_of_tables_norms_and_biases_is_the_merged_model",
    ),
    Fault(
        "a bias is added to the model's own",
        _PARTS,
        "values = values - was if is_added else values",
        "values = values if is_added else values",
        f"{_ROWS}::test_an_adapter_of_tables_norms_and_biases_is_the_merged_model",
    ),
    Fault(
        "a model's own table is held once more",
        _PARTS,
        "return replace(change, whole=None) if is_same else change",
        "return change",
        f"{_ROWS}::test_an_adapter_of_tables_norms_and_biases_is_the_merged_model",
    ),
    Fault(
        "modules to save that are not there are not missed",
        "jaxinfer/checkpoint/adapters/other_tensors.py",
        "if not any(is_saved(tensor, settings, (module,)) for tensor in tensors):",
        "if not tensors:",
        _OF_FOLDERS,
    ),
    Fault(
        "a folder of a repository is left out",
        _PLACE,
        'place["revision"] or revision, **asked) / folder',
        'place["revision"] or revision, **asked)',
        _OF_PLACES,
    ),
    Fault(
        "the revision of an adapter is left out",
        _PLACE,
        'place["revision"] or revision, **asked)',
        "revision, **asked)",
        _OF_PLACES,
    ),
    Fault(
        "a prefix of an adapter is the model's",
        "jaxinfer/engine/kept_pages.py",
        "                adapter=adapter,\n",
        "",
        _OF_PREFIXES,
    ),
    Fault(
        "an adapter whose prefix is held is unloaded",
        "jaxinfer/engine/kept_pages.py",
        "return any(held.adapter == adapter for held in self._held.values())",
        "return False",
        _OF_PREFIXES,
    ),
    Fault(
        "a log does not say whose answer it is",
        "jaxinfer/server/log/entry.py",
        '"adapter": entry.adapter,',
        '"adapter": None,',
        "tests/server/test_log.py::test_an_entry_is_read_as_it_was_written",
    ),
    Fault(
        "queries of latent attention have no adapters",
        "jaxinfer/models/latent_attention.py",
        "project(own, wide, step.adapters_B)",
        "project(own, wide)",
        "tests/models/test_latent.py::test_adapters_are_those_of_the_merged_model",
    ),
    Fault(
        "what latent attention compresses has no adapters",
        "jaxinfer/models/latent_attention.py",
        "project(inputs, shared, step.adapters_B)",
        "project(inputs, shared)",
        "tests/models/test_latent.py::test_adapters_are_those_of_the_merged_model",
    ),
    Fault(
        "parameters in a model's place are not used while no adapter is loaded",
        _LOADED,
        "if LOADED in self.params else params",
        "if LOADED in self.params else self.params",
        "tests/decoding/test_adapters.py::test_a_number_that_is_free_again_is_another_adapters",
    ),
)
