"""Adapters are split as the kernels beside them: on every mesh a row writes what it writes on one device."""

import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.stacking import stack_params
from jaxinfer.ops.backend import choose_backend
from tests.decoding.covered_models import random_model, random_prompts
from tests.decoding.test_adapters import ADAPTERS, with_adapters
from tests.parallel.on_devices.meshes import on_mesh

PROMPTS = [prompt[:20] for prompt in random_prompts()][:4]
NAMES = list(ADAPTERS[1:])


def check(tmp_path, mesh: str, name: str, is_decoded: bool = True, by_tpu_kernels: bool = False) -> None:
    lm = random_model(name)
    if by_tpu_kernels:
        backend = choose_backend("float32", "cpu", scan_layers=True, kernels="interpret")
        lm = LanguageModel(lm.config, stack_params(lm.params, abstract_params(lm.config, backend)), backend)
    one = with_adapters(lm, tmp_path)
    lm = on_mesh(one, mesh)
    for adapter, origin in one.adapters.items():
        lm.load_adapter(adapter, origin)
    expected, found = (np.asarray(each.logits(PROMPTS, adapter=NAMES)) for each in (one, lm))
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(found[row, : len(prompt)], expected[row, : len(prompt)], atol=2e-4)
    if not is_decoded:
        return
    asked = {"max_new_tokens": 8, "adapter": NAMES}
    assert [row.tokens for row in lm.generate(PROMPTS, **asked)] == [
        row.tokens for row in one.generate(PROMPTS, **asked)
    ]


@pytest.mark.slow
def test_logits_of_rows_are_those_of_one_device(tmp_path):
    check(tmp_path, "tensor=2", "gemma2", is_decoded=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "name"),
    [("tensor=2", "gemma2"), ("data=2,tensor=4", "opt"), ("pipeline=2", "gpt2"), ("sequence=2,tensor=2", "gemma2")],
)
def test_rows_are_those_of_one_device(tmp_path, mesh, name):
    check(tmp_path, mesh, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=2", "pipeline=2"])
def test_a_tpus_kernel_reads_each_devices_part(tmp_path, mesh):
    check(tmp_path, mesh, "opt", is_decoded=False, by_tpu_kernels=True)


@pytest.mark.exhaustive
@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # of PEFT
@pytest.mark.parametrize(
    ("variant", "several"), [("deepseek_v3-bias", "LATENTS"), ("gqa-dynamic", "TABLES"), ("opt", "BIASES")]
)
def test_what_peft_saved_is_split_as_the_models_parameters(tmp_path, variant, several):
    parity = pytest.importorskip("tests.checkpoint.adapters.test_live_parity")
    parity.check(tmp_path, variant, getattr(parity, several), mesh="data=2,tensor=4")


@pytest.mark.exhaustive
def test_a_merged_model_stays_on_its_mesh(tmp_path):
    one = with_adapters(random_model("opt"), tmp_path)
    lm = on_mesh(one, "tensor=4")
    lm.load_adapter("dora", one.adapters["dora"])
    merged = lm.merge_adapter("dora")
    assert merged.programs.partitioner.mesh == lm.programs.partitioner.mesh
    found, live = (np.asarray(each) for each in (merged.logits(PROMPTS), one.logits(PROMPTS, adapter="dora")))
    np.testing.assert_allclose(found[1, :3], live[1, :3], atol=2e-4)
