"""DeepSeek-V2 and V3 (and R1), Kimi K2 and GLM-4.7-Flash: latent attention, and experts in groups after a few layers.

Layers that predict further tokens are left out; `jaxinfer.checkpoint.mtp_layer` reads the first.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.grouped_experts import Usual, read_grouped_experts
from jaxinfer.models.families.keys.latent_keys import latent_tensor_names, read_latent_keys

_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_V2 = MappingProxyType(
    {
        **_LATENT,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }
)
_V3 = MappingProxyType(
    {
        **_LATENT,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
    }
)
_GLM_LITE = MappingProxyType(
    {
        **_LATENT,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
    }
)
_V2_EXPERTS = Usual((64, 6, 1407), shared=2, normalised=False)
_V3_EXPERTS = Usual((256, 8, 2048), dense=3, groups=8, kept_groups=4, scale=2.5)
_GLM_LITE_EXPERTS = Usual((64, 4, 1536), dense=1, scale=1.8)


def _translation(
    family: str, defaults: Mapping[str, int], usual: Usual, scoring: str, norm_eps: float = 1e-6
) -> Callable[[Mapping[str, Any]], DecoderConfig]:
    def translate(config: Mapping[str, Any]) -> DecoderConfig:
        reader = ConfigReader(config, family=family)
        decoder = read_latent_keys(reader, family, defaults, norm_eps, (1, 2) if family == "deepseek_v2" else (0, 1))
        experts = read_grouped_experts(reader, decoder.num_layers, usual, scoring)
        return reader.finish(replace(decoder, experts=experts))

    return translate


def _family(model_type: str, architectures: tuple[str, ...], *given: Any) -> Family:
    return Family(model_type, architectures, _translation(model_type, *given), latent_tensor_names)


DEEPSEEK_V2 = _family("deepseek_v2", ("DeepseekV2ForCausalLM",), _V2, _V2_EXPERTS, "softmax")
DEEPSEEK_V3 = _family("deepseek_v3", ("DeepseekV3ForCausalLM",), _V3, _V3_EXPERTS, "sigmoid")
KIMI_K2 = _family("kimi_k2", ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"), _V3, _V3_EXPERTS, "sigmoid")
GLM4_MOE_LITE = _family("glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), _GLM_LITE, _GLM_LITE_EXPERTS, "sigmoid", 1e-5)
