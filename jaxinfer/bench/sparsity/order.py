"""Puts the hidden units of a model in an order in which those that are active together share blocks."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.bench.sparsity.shares import active_features
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_checks import check_texts
from jaxinfer.models.active_columns import feed_forward_kernels
from jaxinfer.models.layers import KERNEL
from jaxinfer.models.unit_order import in_order, order_units
from jaxinfer.notation import Int
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray


def with_units_in_order(lm: LanguageModel, texts: Sequence[Sequence[int]], parts: int = 1) -> LanguageModel:
    """Return the same function with hidden units ordered by what is active in texts, for fewer live blocks of 128.

    The order of sums over hidden units is another, so that results differ by rounding; whatever runs the new model
    agrees in all bits again. An adapter is for units as they were: merge it before. ``parts`` is as in `order_units`.
    Raise InvalidOption for a model on a mesh or in a scan, with experts or with weights in few bits, and for no texts.
    """
    _check(lm)
    return lm.changed(in_order(lm.params, unit_orders(lm, texts, parts)))


def unit_orders(lm: LanguageModel, texts: Sequence[Sequence[int]], parts: int = 1) -> list[Int[np.ndarray, " F"]]:
    """Return the order of each layer's hidden units by what is active in texts (`order_units`)."""
    by_text = [active_features(lm, text) for text in check_texts(texts, lm.config)]
    return [order_units(np.concatenate(layer), parts) for layer in zip(*by_text)]


def _check(lm: LanguageModel) -> None:
    kernels = feed_forward_kernels(lm.params)
    if lm.config.experts is not None:
        raise InvalidOption("hidden units of experts cannot be put in order: use a model without experts")
    stored = [layer.get(KERNEL) for mlp in kernels.values() for layer in mlp.values()]
    if any(isinstance(kernel, QuantizedArray) for kernel in stored):
        raise InvalidOption("hidden units in few bits cannot be put in order: load the model without weights=")
