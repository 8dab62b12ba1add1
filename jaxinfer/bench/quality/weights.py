"""Whether weights can be had in a form, told before anything is measured."""

from typing import Any

import jax

from jaxinfer.checkpoint.few_bits import FewBits
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.few_bits import is_table
from jaxinfer.models.layers import TRANSPOSED_KERNEL


def check_weights(few_bits: FewBits, model: LanguageModel) -> None:
    """Raise InvalidOption for a form that a model, loaded as it is, does not have or divide into."""
    if model.source is not None:
        few_bits.check(model.source)

    def check(path: Any, leaf: Any) -> None:
        names = tuple(key.key for key in path)
        if few_bits.form is not None and few_bits.takes(names):
            form = few_bits.form.of_tables if is_table(names) else few_bits.form
            width = leaf.shape[-2 if names[-1] == TRANSPOSED_KERNEL else -1]
            form.check_width(f"weights {few_bits.name!r}: {'.'.join(names)}", width)

    jax.tree_util.tree_map_with_path(check, model.params)
