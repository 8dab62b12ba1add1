"""LayerSkip needs layers on both sides of its exit."""

from dataclasses import replace

import pytest

from jaxinfer import LanguageModel
from jaxinfer.decoding.strategies.layerskip import LayerSkip
from jaxinfer.errors import InvalidOption
from tests.toys import TINY_LLAMA, float32_backend, random_params


@pytest.mark.parametrize(
    ("num_layers", "exit_layer", "mend"),
    [(1, 0, "use another strategy"), (1, 1, "use another strategy"), (4, 4, "choose 1 to 3")],
)
def test_an_exit_that_leaves_no_layer_is_refused_with_a_mend_that_exists(num_layers, exit_layer, mend):
    with pytest.raises(InvalidOption, match=mend):
        LayerSkip(exit_layer=exit_layer).exit_of(replace(TINY_LLAMA, num_layers=num_layers))


def test_the_exit_is_a_quarter_of_the_layers_unless_it_is_given():
    assert LayerSkip().exit_of(replace(TINY_LLAMA, num_layers=8)) == 2
    assert LayerSkip().exit_of(replace(TINY_LLAMA, num_layers=2)) == 1
    assert LayerSkip(exit_layer=7).exit_of(replace(TINY_LLAMA, num_layers=8)) == 7


def test_an_exit_outside_the_model_is_refused_before_anything_is_computed():
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())
    with pytest.raises(InvalidOption, match="exit_layer=2 is not inside the model's 2 layers"):
        lm.resolve(LayerSkip(exit_layer=2))
