"""BLOOM and BLOOMZ: scores that fall with the distance, a norm of the embedding, and q, k and v fused head by head."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import Alibi, DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.fused_names import rows_by_group
from jaxinfer.models.families.keys.slopes import usual_slopes

_WORDS = MappingProxyType({"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"})
_LINEARS = MappingProxyType(
    {
        "attention.output": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
)
_NORMS = MappingProxyType({"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` bloom; positions have no end but that of the trained texts."""
    reader = ConfigReader({_WORDS.get(key, key): value for key, value in config.items()}, family="bloom")
    num_heads, model_dim = reader.positive_int("n_head", default=8), reader.positive_int("hidden_size", default=64)
    if model_dim % num_heads:
        raise reader.refuse("n_head", num_heads, f"it must divide hidden_size ({model_dim})")
    if reader.boolean("apply_residual_connection_post_layernorm", default=False):
        raise reader.refuse("apply_residual_connection_post_layernorm", True, "sums of normed states are not supported")
    return reader.finish(
        DecoderConfig(
            family="bloom",
            vocab_size=reader.positive_int("vocab_size", default=250880),
            num_layers=reader.positive_int("n_layer", default=2, most=1000),
            model_dim=model_dim,
            ffn_dim=4 * model_dim,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=model_dim // num_heads,
            max_position=reader.positive_int("seq_length", default=2048),
            norm_eps=reader.positive_float("layer_norm_epsilon", default=1e-5),
            layer_pattern=(LayerKind(rope=None),),
            norm="layer",
            activation="gelu_tanh",
            gated_mlp=False,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "embedding_norm"), True),
            alibi=Alibi(usual_slopes(num_heads)),
            tied_embeddings=reader.boolean("tie_word_embeddings", default=True),
            bos_token_id=reader.optional_token("bos_token_id", default=1),
            eos_token_ids=reader.tokens("eos_token_id", default=(2,)),
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a bloom checkpoint."""
    layer = "transformer.h.{layer}"
    top: dict[str, Source] = {"embed.embedding": "transformer.word_embeddings.weight"}
    block: dict[str, Source] = {}
    if not config.tied_embeddings:
        top["head.kernel"] = "lm_head.weight"
    for kind, word, norm_kind in (("kernel", "weight", "scale"), ("bias", "bias", "bias")):
        top[f"embed_norm.{norm_kind}"] = f"transformer.word_embeddings_layernorm.{word}"
        top[f"final_norm.{norm_kind}"] = f"transformer.ln_f.{word}"
        block |= {f"{ours}.{norm_kind}": f"{layer}.{theirs}.{word}" for ours, theirs in _NORMS.items()}
        block |= {f"{ours}.{kind}": f"{layer}.{theirs}.{word}" for ours, theirs in _LINEARS.items()}
        fused = rows_by_group(config, f"{layer}.self_attention.query_key_value.{word}")
        block |= {f"attention.{name}.{kind}": part for name, part in fused.items()}
    ignored = (r"lm_head\.weight",) if config.tied_embeddings else ()
    return TensorNames(top, block, ignored, optional_prefix="transformer.")


BLOOM = Family("bloom", ("BloomForCausalLM", "BloomModel"), translate, tensor_names)
