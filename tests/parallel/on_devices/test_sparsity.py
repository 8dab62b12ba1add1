"""Devices leave out features of their own: in the bits of all features on CPUs, and by their own blocks on TPUs."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.sparsity import parse_sparsity
from tests.decoding.test_sparsity import quieter
from tests.models.test_live_blocks import CONFIGS, TPU, drawn
from tests.parallel.on_devices.meshes import make_model, on_mesh

EXACT = parse_sparsity("exact")
TEXTS = np.random.default_rng(1).integers(1, 16, (2, 11)).tolist()


@pytest.mark.parametrize(
    "mesh", ["tensor=2", *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in ("data=2,tensor=2", "data=2"))]
)
def test_on_cpus_results_have_the_bits_of_all_features(mesh):
    """With columns of other signs they are others: those are what is read."""
    lm = quieter(make_model("opt"))
    dense, sparse = (on_mesh(lm, mesh, sparsity=sparsity) for sparsity in (None, EXACT))
    expected = np.asarray(dense.logits(TEXTS))
    np.testing.assert_array_equal(np.asarray(sparse.logits(TEXTS)), expected)
    held = sparse._beside_columns.__self__
    held._columns, held._last = {name: -columns for name, columns in held._columns.items()}, None
    assert (np.asarray(sparse.logits(TEXTS)) != expected).any()


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        pytest.param("tensor=2", "gated", marks=pytest.mark.slow),
        *(
            pytest.param(mesh, name, marks=pytest.mark.exhaustive)
            for mesh in ("data=2,tensor=2", "tensor=3", "pipeline=2")
            for name in CONFIGS
        ),
    ],
)
def test_on_tpus_each_device_reads_its_own_live_blocks(mesh, name):
    """Of two devices' blocks others are live, and both have some that are cut."""
    params = drawn(name)
    dense, sparse = (LanguageModel(CONFIGS[name], params, replace(TPU, sparsity=each)) for each in (None, EXACT))
    expected = np.asarray(dense.logits(TEXTS))
    np.testing.assert_allclose(on_mesh(sparse, mesh).logits(TEXTS), expected, atol=1e-5 * expected.std())


def test_stages_of_a_pipeline_on_cpus_are_refused():
    with pytest.raises(InvalidOption, match="does not go with stages of a pipeline on a CPU"):
        on_mesh(make_model("opt"), "pipeline=2", sparsity=EXACT)
