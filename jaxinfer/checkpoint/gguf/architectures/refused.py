"""The architectures of llama.cpp that are not supported, and what they are."""

from collections.abc import Mapping
from types import MappingProxyType

_EXPERTS = """
    arctic bailingmoe bailingmoe2 deepseek deepseek2-ocr grok grovemoe mistral4 smallthinker
"""
_LINEAR = """
    qwen3next qwen35 qwen35moe kimi-linear lfm2 lfm2moe rwkv6 rwkv6qwen2 rwkv7 arwkv7
"""
_STATE_SPACE = """
    mamba mamba2 jamba falcon-h1 nemotron_h nemotron_h_moe plamo2
"""
_ENCODER = """
    bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding llama-embed
    t5encoder
"""
_DIFFUSION = """
    dream llada llada-moe rnd1
"""
_UNEVEN = """
    deci openelm mimo2 step35
"""
_VISION = """
    chameleon clip cogvlm gemma3n gemma4 hunyuan_vl paddleocr wavtokenizer-dec
"""
_WITHOUT_FILES = """
    gptj
"""
_OTHERS = """
    jais maincoder plamo plamo3 plm refact
"""

WHAT: Mapping[str, str] = MappingProxyType(
    {
        "glm-dsa": "a model whose attention chooses among earlier tokens",
        "t5": "a model with an encoder and a decoder",
        **dict.fromkeys(_EXPERTS.split(), "a mixture of experts of another kind"),
        **dict.fromkeys(_LINEAR.split(), "a model with linear attention or convolutions"),
        **dict.fromkeys(_STATE_SPACE.split(), "a model with state-space layers"),
        **dict.fromkeys(_ENCODER.split(), "an encoder without a decoder"),
        **dict.fromkeys(_DIFFUSION.split(), "a model that writes all tokens of a text at once"),
        **dict.fromkeys(_UNEVEN.split(), "a model whose layers have different numbers of heads"),
        **dict.fromkeys(_VISION.split(), "a model of images or sound beside text"),
        **dict.fromkeys(
            _WITHOUT_FILES.split(), "a name for which llama.cpp has no model: load the Hugging Face folder"
        ),
        **dict.fromkeys(_OTHERS.split(), "a decoder of another kind"),
    }
)
