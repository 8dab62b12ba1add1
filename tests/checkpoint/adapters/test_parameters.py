"""What PEFT adds to experts' matrices in one parameter is each expert's own, however the base model stores them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint.adapters.other_tensors import PREFIX
from jaxinfer.checkpoint.adapters.peft_folder import WEIGHTS, open_adapter
from jaxinfer.checkpoint.adapters.settings import CONFIG
from jaxinfer.errors import InvalidCheckpoint, JaxinferError, UnsupportedModel
from jaxinfer.models.families.registry import family_of
from tests.checkpoint.adapters.test_experts import DESCRIBED

EXPERTS, RANK, WIDTH, INNER = 4, 3, 32, 24
MODULE = "model.layers.{}.mlp.experts"
GPT_OSS = {
    **DESCRIBED,
    "model_type": "gpt_oss",
    "head_dim": 8,
    "layer_types": ["full_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def drawn(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def matrices(inputs, outputs):
    return drawn(RANK * EXPERTS, inputs), drawn(outputs, RANK * EXPERTS)


def write(folder, pairs, targets, **settings):
    """Write pairs by module."""
    tensors = {}
    for module, (first, second) in pairs.items():
        tensors |= {f"{PREFIX}{module}.lora_A.weight": first, f"{PREFIX}{module}.lora_B.weight": second}
    save_file(tensors, folder / WEIGHTS)
    written = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": []}
    (folder / CONFIG).write_text(json.dumps({**written, "target_parameters": targets, **settings}))
    return folder


def changes(folder, described, shapes):
    family = family_of(described)
    config = family.translate(described)
    return open_adapter(folder, family.tensor_names(config), config, shapes).changes


def of_expert(first, second, expert):
    """Return what PEFT adds: einsum("o r e, e r i -> e o i"), times alpha / r."""
    return 2 * second.reshape(len(second), RANK, EXPERTS)[..., expert] @ first.reshape(EXPERTS, RANK, -1)[expert]


def test_a_matrix_for_each_expert_gets_its_rows_of_both_parameters(tmp_path):
    both, down = matrices(WIDTH, 2 * INNER), matrices(INNER, WIDTH)
    module, stored = MODULE.format(1), "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
    write(
        tmp_path,
        {f"{module}.base_layer": both, module: down},
        ["1.mlp.experts.down_proj", "1.mlp.experts.gate_up_proj"],
    )
    wide, narrow = (INNER, WIDTH), (WIDTH, INNER)
    shapes = {
        stored.format(expert, of): narrow if of == "w2" else wide for expert in range(4) for of in ("w1", "w2", "w3")
    }
    found = changes(tmp_path, DESCRIBED, shapes)
    assert found.keys() == shapes.keys()
    for expert in range(EXPERTS):
        added = of_expert(*both, expert)
        expected = {"w1": added[:INNER], "w3": added[INNER:], "w2": of_expert(*down, expert)}
        for of, delta in expected.items():
            base = drawn(*delta.shape)
            np.testing.assert_allclose(
                found[stored.format(expert, of)].applied_to(base), base + delta, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("swapped", [False, True])
def test_stacks_that_are_stored_the_other_way_round_are_added_to_as_they_stand(tmp_path, swapped):
    """Sizes tell which of A and B meets the inputs, as PEFT has it depend on its version and on the module."""
    module, shape = MODULE.format(0), (EXPERTS, WIDTH, 2 * INNER)
    first, second = matrices(2 * INNER, WIDTH) if swapped else matrices(WIDTH, 2 * INNER)
    write(tmp_path, {module: (first, second)}, ["0.mlp.experts.gate_up_proj"])
    (tensor, change), *others = changes(tmp_path, GPT_OSS, {f"{module}.gate_up_proj": shape}).items()
    assert tensor == f"{module}.gate_up_proj"
    assert not others
    base = drawn(*shape)
    added = np.stack([of_expert(first, second, expert) for expert in range(EXPERTS)])
    added = added if swapped else added.swapaxes(1, 2)
    np.testing.assert_allclose(change.applied_to(base), base + added, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused_by_one_line(tmp_path):
    module, shapes = MODULE.format(0), {f"{MODULE.format(0)}.gate_up_proj": (EXPERTS, WIDTH, 2 * INNER)}
    good = matrices(WIDTH, 2 * INNER)
    cases = {
        "its rank 3": ({module: matrices(WIDTH + 1, 2 * INNER)}, ["experts.gate_up_proj"], InvalidCheckpoint),
        "its matrices are not there": (
            {f"{module}.base_layer": good, module: good},
            ["gate_up_proj"],
            InvalidCheckpoint,
        ),
        "has no matrices there": ({"model.layers.0.mlp.router": good}, ["gate_up_proj"], InvalidCheckpoint),
        "no such parameter": ({"model.layers.7.mlp.experts": good}, ["7.mlp.experts.gate_up_proj"], UnsupportedModel),
        "1.mlp.experts.gate_up_proj, which has no matrices": (
            {module: good},
            ["experts.gate_up_proj"],
            InvalidCheckpoint,
        ),
        "no list of names": ({module: good}, "gate_up_proj", InvalidCheckpoint),
    }
    for line, (pairs, targets, kind) in cases.items():
        with pytest.raises(JaxinferError, match=line) as error:
            changes(write(tmp_path, pairs, targets), GPT_OSS, shapes)
        assert isinstance(error.value, kind)
        assert "\n" not in str(error.value)
