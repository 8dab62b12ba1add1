"""Adapters of experts are split as the experts are: on every mesh a row has the logits that it has on one device."""

import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.models.families.registry import family_of
from jaxinfer.ops.backend import choose_backend
from tests.checkpoint.adapters.test_experts import DESCRIBED, NAMES, PROMPTS, logits, write
from tests.parallel.on_devices.meshes import on_mesh
from tests.toys import random_params


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["tensor=2", "expert=2", "expert=2,tensor=2", "pipeline=2"])
def test_rows_are_those_of_one_device(tmp_path, mesh):
    config = family_of(DESCRIBED).translate(DESCRIBED)
    one = LanguageModel(config, random_params(config, seed=3), choose_backend("float32", "cpu"))
    split = on_mesh(one, mesh)
    for rank, name in ((3, "all"), (9, "one")):
        folder = write(tmp_path / name, name, rank)
        for lm in (one, split):
            lm.load_adapter(name, folder)
    expected, found = (logits(lm, range(4), NAMES) for lm in (one, split))
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(found[row, : len(prompt)], expected[row, : len(prompt)], atol=2e-4)
