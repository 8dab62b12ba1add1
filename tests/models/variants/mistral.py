"""Variants of Mistral: with a window on every layer, and with heads of their own width and none."""

from collections.abc import Mapping

from tests.models.variants.variant import Variant, rolled_kv_heads, rope, window

VARIANTS: Mapping[str, Variant] = {
    "mistral-window": Variant(
        {"sliding_window": 16},
        {"window": window(None), "one more": window(17), "one less": window(15), "grouping": rolled_kv_heads},
        model_type="mistral",
    ),
    "mistral-head_dim-theta-tied": Variant(
        {
            "sliding_window": None,
            "head_dim": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {"theta": rope(theta=1e4)},
        model_type="mistral",
    ),
}
