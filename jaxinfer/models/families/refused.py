"""The ``model_type`` of well-known models that are not supported, and what they are."""

from collections.abc import Mapping
from types import MappingProxyType

_EXPERTS = """
    qwen3_next qwen3_5_moe deepseek_v32 flex_olmo dbrx jetmoe glm_moe_dsa
    minimax kimi_k25 afmoe longcat_flash
    bailing_moe solar_open cohere2_moe lfm2_moe
"""
_STATE_SPACE = """
    mamba mamba2 falcon_mamba jamba zamba zamba2 bamba falcon_h1 nemotron_h rwkv xlstm recurrent_gemma lfm2 kimi_linear
    olmo_hybrid
"""
_ENCODER_DECODER = """
    t5 mt5 umt5 byt5 bart mbart pegasus blenderbot m2m_100 marian switch_transformers longt5 t5gemma t5gemma2 whisper
    encoder_decoder
"""
_ENCODER = "bert roberta xlm-roberta distilbert deberta deberta-v2 electra albert modernbert mpnet nomic_bert"
_VISION = """
    qwen3_vl_moe llava_onevision mllama idefics idefics2 paligemma gemma3n gemma4 glm4v glm46v pixtral kimi_vl
    phi4_multimodal phi3_v molmo2 janus fuyu blip-2 qwen2_5_omni qwen3_omni_moe
"""

WHAT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(_EXPERTS.split(), "a mixture of experts of another kind"),
        **dict.fromkeys(_STATE_SPACE.split(), "a model with state-space or recurrent layers"),
        **dict.fromkeys(_ENCODER_DECODER.split(), "a model with an encoder and a decoder"),
        **dict.fromkeys(_ENCODER.split(), "an encoder without a decoder"),
        **dict.fromkeys(_VISION.split(), "a model of images, sound or video beside text"),
    }
)
