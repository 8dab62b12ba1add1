"""What text decoders beside a vision model usually are, and positions of images, which texts do not have."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.models.families.keys.llama_keys import sizes

_QWEN2 = {
    **sizes(152064, 8192, 29568, 80, 64, 8, None, 32768),
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# What text models have that are not those that stand alone, where their files do not say it; and their rotary base.
USUAL: Mapping[str, tuple[Mapping[str, Any], float]] = MappingProxyType(
    {
        "qwen2_vl": (_QWEN2, 1e6),
        "qwen2_5_vl": (_QWEN2, 1e6),
        "qwen3_vl": ({"max_position_embeddings": 128000}, 5e5),
        "qwen3_vl_moe": (
            {
                **sizes(151936, 2048, 5632, 24, 16, 16, None, 128000),
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "norm_topk_prob": True,
                "tie_word_embeddings": True,
            },
            5e5,
        ),
    }
)
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def without_image_positions(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys without positions of three axes (M-RoPE), which are one and the same for text."""
    changed = dict(text)
    for name in ("rope_scaling", "rope_parameters"):
        section = text.get(name)
        if isinstance(section, Mapping):
            left = {key: value for key, value in section.items() if key not in _OF_IMAGES}
            changed[name] = {key: "default" if value == "mrope" else value for key, value in left.items()} or None
    return changed
