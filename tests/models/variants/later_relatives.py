"""Variants of BioGPT, XGLM, GPT-1, HyperCLOVA X and Granite Swash, and of relatives of mixtures and of DeepSeek."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from tests.models.variants import gpt2, opt
from tests.models.variants.experts import ALL, experts
from tests.models.variants.granite import rotating
from tests.models.variants.latent import LATENT, rolled
from tests.models.variants.olmo import norms_before
from tests.models.variants.opt import dtype_to_version_4
from tests.models.variants.relatives import without_layer_types
from tests.models.variants.variant import (
    SIZES,
    Variant,
    embedding_as_head,
    rolled_kv_heads,
    rope_to_version_4,
    settings,
    swapped_kinds,
    window,
    zeroed,
)

_BIASES = {f"{name} bias": zeroed(name, "bias") for name in ("query", "value", "output", "up", "down")}
_BIOGPT_SIZES = {("intermediate_size" if key == "ffn_dim" else key): value for key, value in opt.SIZES.items()}
_XGLM_WORDS = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads"}
_XGLM_SIZES = {_XGLM_WORDS.get(key, key): value for key, value in opt.SIZES.items()}
_LATENT_SIZES = {key: LATENT[key] for key in LATENT if "expert" not in key and not key.startswith(("moe", "first"))}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.5,
}
_WITHOUT_FACTORS = {
    "embedding factor": settings(embedding_scale=None),
    "attention factor": settings(attention_scale=None),
    "residual factor": settings(residual_scale=None),
    "logits factor": settings(logit_scale=None),
}
_EIGHT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_SWASH = {
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "layer_rope_theta": [0, 1000.0, 10000.0],
}
_GROUPED = {
    **ALL,
    "correction": experts(correction_bias=False),
    "normalised": experts(normalised=False),
    "scale": experts(scale=1.0),
    "shared expert": zeroed("shared", "down", "kernel"),
}


def reversed_layers(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Give the first layer the last one's window and rotation, and so on."""
    return replace(config, layer_pattern=config.layers[::-1]), params


def mellum_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rename what transformers 5 writes of the stored dtype; there was no Mellum in version 4."""
    ropes = config["rope_parameters"]
    older = {key: value for key, value in dtype_to_version_4(config).items() if key != "rope_parameters"}
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    return {**older, "rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"]}


_SWASH_WITHOUT = {
    "sinks": settings(attention_sinks=False),
    "window": window(None),
    "which layers": reversed_layers,
}
VARIANTS: Mapping[str, Variant] = {
    "biogpt": Variant(
        {},
        {**_BIASES, "scaled embedding": settings(embedding_scale=None), "positions": zeroed("positions", "embedding")},
        model_type="biogpt",
        sizes=_BIOGPT_SIZES,
        to_version_4=dtype_to_version_4,
    ),
    "xglm": Variant(
        {"scale_embedding": False},
        {
            **_BIASES,
            "sinusoids": settings(sinusoids=None),
            "their beginning": settings(sinusoids=1),
            "activation": settings(activation="relu"),
        },
        model_type="xglm",
        sizes=_XGLM_SIZES,
        to_version_4=dtype_to_version_4,
    ),
    "openai-gpt": Variant(
        {"layer_norm_epsilon": 0.1},
        {
            **_BIASES,
            "norms after": settings(block="pre_norm"),
            "activation": settings(activation="relu"),
            "norm_eps": settings(norm_eps=1e-5),
        },
        model_type="openai-gpt",
        sizes=gpt2.SIZES,
        to_version_4=dtype_to_version_4,
    ),
    "hyperclovax": Variant(
        {**_FACTORS, "attention_bias": True, "mlp_bias": True},
        {
            **_WITHOUT_FACTORS,
            "norms after each part": settings(block="pre_norm"),
            "grouping": rolled_kv_heads,
            "gate bias": zeroed("gate", "bias"),
        },
        model_type="hyperclovax",
    ),
    "hyperclovax-norms_before": Variant(
        {"use_post_norm": False, "tie_word_embeddings": True}, {"grouping": rolled_kv_heads}, model_type="hyperclovax"
    ),
    "granite_swa": Variant(
        {**_SWASH, **_FACTORS, "logits_scaling": 0.4},
        {**_WITHOUT_FACTORS, **_SWASH_WITHOUT, "untied": embedding_as_head},
        model_type="granite_swa",
        to_version_4=rope_to_version_4,
    ),
    "granitemoe_swa": Variant(
        {**_SWASH, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
        {**ALL, **_SWASH_WITHOUT, "shared expert": zeroed("shared", "down", "kernel")},
        model_type="granitemoe_swa",
    ),
    "solar_open": Variant(
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "routed_scaling_factor": 1.6,
            "attention_bias": True,
            "head_dim": 16,
        },
        {**_GROUPED, "groups": experts(groups=1), "biases": zeroed("query", "bias")},
        model_type="solar_open",
        sizes={key: value for key, value in SIZES.items() if key != "intermediate_size"},
    ),
    "exaone_moe": Variant(
        {
            **_EIGHT,
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "sliding_window_pattern": 2,
            "first_k_dense_replace": 1,
        },
        {
            **_GROUPED,
            "norms of heads": settings(qk_norm=None),
            "window": window(None),
            "layers without rotation": rotating,
        },
        model_type="exaone_moe",
        to_version_4=without_layer_types,
    ),
    "hy_v3": Variant(
        {**_EIGHT, "num_hidden_layers": 3, "head_dim": 16, "router_scaling_factor": 1.7},
        {**_GROUPED, "norms of heads": settings(qk_norm=None)},
        model_type="hy_v3",
    ),
    "youtu": Variant(
        {"tie_word_embeddings": True},
        {
            "whose keys": rolled("key_heads"),
            "latent norm": zeroed("latent_norm", "scale"),
            "query norm": zeroed("query_norm", "scale"),
        },
        model_type="youtu",
        sizes=_LATENT_SIZES,
    ),
    "minicpm3": Variant(
        {"scale_emb": 3, "scale_depth": 0.8, "dim_model_base": 96},
        {
            "whose values": rolled("value_heads"),
            "embedding factor": settings(embedding_scale=None),
            "residual factor": settings(residual_scale=None),
            "logits factor": settings(logit_scale=None),
            "shared key": zeroed("attention", "key", "kernel"),
        },
        model_type="minicpm3",
        sizes=_LATENT_SIZES,
    ),
    "flex_olmo": Variant(
        {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4},
        # A norm follows, so that it does not matter by what all weights are divided.
        {**ALL, "norms": settings(qk_norm=None), "norms after": norms_before},
        model_type="flex_olmo",
    ),
    "mellum": Variant(
        {
            **_EIGHT,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        {
            **ALL,
            "normalised": experts(normalised=False),
            "norms of heads": settings(qk_norm=None),
            "window": window(None),
            "which layers": swapped_kinds,
        },
        model_type="mellum",
        to_version_4=mellum_to_version_4,
    ),
}
