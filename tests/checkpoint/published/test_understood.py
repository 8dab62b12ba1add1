"""Configurations that published checkpoints have in other words: they are read as the same numbers."""

import copy
import functools

import numpy as np
import pytest

from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.errors import InvalidCheckpoint
from tests.checkpoint.published.cases import CASES
from tests.checkpoint.published.folders import write_folder
from tests.late_imports import late

late("torch")
pytestmark = pytest.mark.parity

NAME = "model.layers.1.mlp.down_proj"
OUTPUTS, WIDTH = 64, 128


def open_case(folder, name, edit=lambda config: None, more=None):
    """Write one matrix as a case packs it, with another configuration; return the source and the matrix."""
    tensors, weights = CASES[name].pack(np.random.default_rng(0), OUTPUTS, WIDTH)
    config = copy.deepcopy(CASES[name].config)
    edit(config)
    written = {f"{NAME}.{part}": values for part, values in tensors.items()}
    write_folder(folder, {**written, **(more or {})}, {"quantization_config": config})
    return open_hf_folder(folder).tensors, weights


def put(**keys):
    return lambda config: config.update(keys)


def groups(*others, first="group_1"):
    """Put the case's group, for down projections, behind or before others that match too."""

    def edit(config):
        (own,) = config["config_groups"].values()
        weights = {**own["weights"], "symmetric": not own["weights"]["symmetric"]}
        found = {name: {**own, "targets": targets, "weights": weights} for name, targets in others}
        own = {first: {**own, "targets": ["re:.*down_proj"]}}
        config["config_groups"] = {**own, **found} if first < "group_1" else {**found, **own}

    return edit


# As transformers writes AWQ's, with GPTQ's keys.
AWQ = {"tokenizer": None, "dataset": None, "damp_percent": 0.1, "desc_act": False, "act_group_aware": True, "sym": True}
AWQ |= {"true_sequential": True, "meta": None, "model_seqlen": None, "block_name_to_quantize": None, "batch_size": 1}
AWQ |= {"module_name_preceding_first_block": None, "pad_token_id": None, "max_input_length": None}
AWQ |= {"cache_block_outputs": True, "modules_in_block_to_quantize": None}
DENSE = {"format": "dense", "global_sparsity": 0.1, "ignore": [], "sparsity_structure": "unstructured", "targets": []}


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("fp8_blocks", put(fmt="float8_e4m3fn")),
        ("fp8_blocks", put(scale_fmt="ue8m0")),
        ("awq", put(**AWQ)),
        ("compressed_int4", put(sparsity_config=DENSE)),
        ("compressed_int8_asymmetric", groups(("group_0", ["Linear"]))),
        ("compressed_int8", groups(("group_0", ["Linear"]), ("group_2", ["re:.*up_proj"]))),
        ("compressed_int8", groups(("group_2", ["re:.*down_proj", "re:.*proj"]), first="group_3")),
        ("compressed_int4_asymmetric", groups(("group_1", ["Linear", "lm_head"]), first="group_0")),
        ("bitnet_online", put(modules_to_not_convert=["model.layers.0", "layers.1", "model.layers.1.mlp.down"])),
    ],
)
def test_other_words_mean_the_same_numbers(tmp_path, name, edit):
    source, weights = open_case(tmp_path, name, edit)
    np.testing.assert_allclose(source.read(f"{NAME}.weight", np.dtype(np.float32)), weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("key", ["model.layers.1", "down_proj", "model.layers.*.mlp", "model.layers.1.mlp.down_proj"])
def test_modules_of_bitnet_that_are_not_converted_stay_plain(tmp_path, key):
    """A module's beginning, its end, and a regular expression, as transformers takes them."""
    plain = np.linspace(-1, 1, OUTPUTS * WIDTH, dtype=np.float32).reshape(OUTPUTS, WIDTH)
    other = {"model.layers.0.self_attn.q_proj.weight": plain}
    source, _ = open_case(tmp_path, "bitnet_online", put(modules_to_not_convert=[key]), other)
    read = functools.partial(source.read, dtype=np.dtype(np.float32))
    assert len(np.unique(read(f"{NAME}.weight"))) > 3
    assert len(np.unique(read("model.layers.0.self_attn.q_proj.weight"))) == 3


@pytest.mark.parametrize("mask", [np.ones((4, 4), bool), np.ones((4, 4), np.uint8), np.arange(4)])
def test_a_buffer_that_nobody_reads_may_have_any_type(tmp_path, mask):
    """The causal mask of GPT-NeoX, or positions: families leave these out."""
    source, weights = open_case(tmp_path, "gptq", more={"gpt_neox.layers.0.attention.bias": mask})
    np.testing.assert_allclose(source.read(f"{NAME}.weight", np.dtype(np.float32)), weights, rtol=1e-6)
    with pytest.raises(InvalidCheckpoint, match=r"attention\.bias.* type"):
        source.read("gpt_neox.layers.0.attention.bias", np.dtype(np.float32))
