"""Experts of several devices by a TPU's grouped product, interpreted."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import MeshConfig
from tests.ops.test_experts import CHOICES
from tests.ops.test_grouped_experts import CROWDED, TPU, expected, run


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(expert=2, tensor=2), pytest.param(MeshConfig(expert=3), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_every_token_gets_its_experts_wherever_they_are(mesh):
    """Also where all tokens go to experts of one device, and to none of another."""
    backend = replace(TPU, mesh=mesh.build(jax.devices()[: mesh.num_devices]))
    for chosen in (CHOICES, CROWDED):
        np.testing.assert_allclose(run(chosen, backend=backend), expected(chosen), atol=2e-6)
