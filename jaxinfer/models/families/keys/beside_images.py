"""What a ``config.json`` says beside its text decoder, and positions of images, which texts do not have."""

from collections.abc import Mapping
from typing import Any

_OUTER = """
    architectures model_type dtype torch_dtype transformers_version text_config vision_config tie_word_embeddings
    image_token_id video_token_id image_token_index video_token_index vision_start_token_id vision_end_token_id
    vision_token_id vision_feature_layer vision_feature_select_strategy projector_hidden_act multimodal_projector_bias
    image_seq_length image_grid_pinpoints spatial_merge_size downsample_factor downsample_ratio adapter_layer_norm_eps
    alignment_intermediate_size scale_factor use_image_newline_parameter ignore_index pad_token_id use_cache
"""
OUTER_KEYS = frozenset(_OUTER.split())
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
