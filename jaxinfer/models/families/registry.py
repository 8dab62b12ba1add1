"""The supported model families, by the ``model_type`` of ``config.json``."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.afmoe import AFMOE
from jaxinfer.models.families.apertus import APERTUS
from jaxinfer.models.families.beside_images import BESIDE_IMAGES
from jaxinfer.models.families.bitnet import BITNET
from jaxinfer.models.families.bloom import BLOOM
from jaxinfer.models.families.cohere import COHERE, COHERE2
from jaxinfer.models.families.cohere_compass import COHERE_COMPASS_TEXT
from jaxinfer.models.families.dbrx import DBRX
from jaxinfer.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2
from jaxinfer.models.families.dots import DOTS1
from jaxinfer.models.families.ernie_moe import ERNIE_MOE
from jaxinfer.models.families.exaone import EXAONE3, EXAONE4
from jaxinfer.models.families.falcon import FALCON
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.gemma import GEMMA
from jaxinfer.models.families.gemma2 import GEMMA2, VAULTGEMMA
from jaxinfer.models.families.gemma3 import GEMMA3, GEMMA3_TEXT
from jaxinfer.models.families.glm import GLM, GLM4
from jaxinfer.models.families.glm_moe import GLM4_MOE, SOLAR_OPEN
from jaxinfer.models.families.glm_moe_relatives import EXAONE_MOE, HY_V3
from jaxinfer.models.families.gpt1 import GPT1
from jaxinfer.models.families.gpt2 import GPT2, GPT_SW3
from jaxinfer.models.families.gpt_bigcode import GPT_BIGCODE
from jaxinfer.models.families.gpt_neo import GPT_NEO
from jaxinfer.models.families.gpt_neox import GPT_NEOX
from jaxinfer.models.families.gpt_oss import GPT_OSS
from jaxinfer.models.families.gptj import CODEGEN, GPTJ
from jaxinfer.models.families.granite import GRANITE, GRANITE_HYBRID
from jaxinfer.models.families.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from jaxinfer.models.families.granite_relatives import GRANITE_MOE_SWA, GRANITE_SWA, HYPERCLOVAX
from jaxinfer.models.families.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE
from jaxinfer.models.families.latent_relatives import MINICPM3, YOUTU
from jaxinfer.models.families.llama import LLAMA
from jaxinfer.models.families.llama4 import LLAMA4, LLAMA4_TEXT
from jaxinfer.models.families.llama_namesakes import CWM, INTERNLM3, IQUEST, JAIS2
from jaxinfer.models.families.llama_relatives import ARCEE, ERNIE, HELIUM, SEED_OSS
from jaxinfer.models.families.mellum import MELLUM
from jaxinfer.models.families.minimax import MINIMAX_M2
from jaxinfer.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from jaxinfer.models.families.mixtral import MIXTRAL
from jaxinfer.models.families.mpt import MPT
from jaxinfer.models.families.nanochat import NANOCHAT
from jaxinfer.models.families.nemotron import NEMOTRON
from jaxinfer.models.families.olmo import OLMO, OLMO2, OLMO3
from jaxinfer.models.families.olmoe import FLEX_OLMO, OLMOE
from jaxinfer.models.families.opt import OPT
from jaxinfer.models.families.opt_relatives import BIOGPT, XGLM
from jaxinfer.models.families.persimmon import PERSIMMON
from jaxinfer.models.families.phi import PHI
from jaxinfer.models.families.phi3 import PHI3
from jaxinfer.models.families.phimoe import PHIMOE
from jaxinfer.models.families.qwen import MIMO, QWEN2, QWEN3
from jaxinfer.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jaxinfer.models.families.refused import WHAT
from jaxinfer.models.families.smollm3 import SMOLLM3
from jaxinfer.models.families.stablelm import STABLELM
from jaxinfer.models.families.starcoder2 import STARCODER2

_ALL = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, OPT, GPT2, PHI, PHI3, GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA3),
    *(OLMO2, OLMO3, SMOLLM3, GRANITE, GRANITE_HYBRID, GLM, GLM4, STABLELM, STARCODER2, COHERE, COHERE2),
    *(OLMO, MINISTRAL, SEED_OSS, ARCEE, HELIUM, ERNIE, EXAONE4, GPT_NEOX),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, GRANITE_MOE_SHARED, GLM4_MOE, GPT_OSS, MIMO),
    *(DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, GLM4_MOE_LITE, LLAMA4_TEXT, LLAMA4),
    *(PHIMOE, DOTS1, ERNIE_MOE, MINIMAX_M2, HUNYUAN_DENSE, HUNYUAN_MOE, MINISTRAL3),
    *(NEMOTRON, APERTUS, FALCON, GPT_BIGCODE, GPT_NEO, GPTJ, CODEGEN),
    *(BLOOM, MPT),
    *(EXAONE3, INTERNLM3, IQUEST, CWM, JAIS2, VAULTGEMMA, GPT_SW3),
    *(PERSIMMON, DBRX, BITNET, AFMOE, NANOCHAT, BIOGPT, XGLM, GPT1, HYPERCLOVAX, GRANITE_SWA, GRANITE_MOE_SWA),
    *(SOLAR_OPEN, EXAONE_MOE, HY_V3, YOUTU, MINICPM3, FLEX_OLMO, MELLUM, COHERE_COMPASS_TEXT),
    *BESIDE_IMAGES,
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in _ALL})


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a ``config.json``.

    Raises :class:`UnsupportedModel`, which says what a well-known model is instead, or else lists the supported ones.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        what = WHAT.get(model_type) if isinstance(model_type, str) else None
        if what is not None:
            raise UnsupportedModel(f"config.json: model_type {model_type!r} is {what}, which is not supported")
        raise UnsupportedModel(f"config.json: model_type {model_type!r} is not supported; known: {', '.join(FAMILIES)}")
    architectures = config.get("architectures") or list(family.architectures)
    if not isinstance(architectures, list) or not any(known in architectures for known in family.architectures):
        known = ", ".join(family.architectures)
        raise UnsupportedModel(f"config.json: architectures {architectures!r} are not supported; known: {known}")
    return family


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of any supported family."""
    return family_of(config).translate(config)
