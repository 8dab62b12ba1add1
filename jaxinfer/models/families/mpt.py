"""MPT: scores that fall with the distance, LayerNorm without a bias, no biases, and q, k and v fused."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import Alibi, DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.generic_keys import GENERIC_KEYS
from jaxinfer.models.families.keys.slopes import mpt_slopes

# Transformers computes these and nothing else, whatever a file says.
_ONLY = {"prefix_lm": False, "qk_ln": False, "alibi": True, "attn_uses_sequence_id": False}
_TRAINING = frozenset({"attn_pdrop", "attn_impl"})


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` mpt."""
    words = {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"}
    changed = {words.get(key, key): value for key, value in config.items()}
    if isinstance(inner := config.get("attn_config"), Mapping):
        changed["attn_config"] = {key: value for key, value in inner.items() if key not in GENERIC_KEYS | _TRAINING}
    reader = ConfigReader(changed, family="mpt")
    num_heads, model_dim = reader.positive_int("n_heads", default=16), reader.positive_int("d_model", default=2048)
    if model_dim % num_heads:
        raise reader.refuse("n_heads", num_heads, f"it must divide d_model ({model_dim})")
    if (ratio := reader.positive_int("expansion_ratio", default=4)) != 4:
        raise reader.refuse("expansion_ratio", ratio, "transformers has 4, whatever it says")
    if not reader.boolean("no_bias", default=True):
        raise reader.refuse("no_bias", False, "transformers has no biases, whatever it says")
    largest, scale, clip = _read_attention(reader)
    return reader.finish(
        DecoderConfig(
            family="mpt",
            vocab_size=reader.positive_int("vocab_size", default=50368),
            num_layers=reader.positive_int("n_layers", default=24, most=1000),
            model_dim=model_dim,
            ffn_dim=4 * model_dim,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=model_dim // num_heads,
            max_position=reader.positive_int("max_seq_len", default=2048),
            norm_eps=reader.positive_float("layer_norm_epsilon", default=1e-5),
            layer_pattern=(LayerKind(rope=None),),
            norm="scaled_layer",
            activation="gelu",
            gated_mlp=False,
            alibi=Alibi(mpt_slopes(num_heads, largest)),
            attention_scale=scale,
            clip_qkv=clip,
            tied_embeddings=reader.boolean("tie_word_embeddings", default=True),
            bos_token_id=reader.optional_token("bos_token_id"),
            eos_token_ids=reader.tokens("eos_token_id", default=()),
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of an mpt checkpoint."""
    layer, total = "transformer.blocks.{layer}", 3 * config.model_dim
    top: dict[str, Source] = {
        "embed.embedding": "transformer.wte.weight",
        "final_norm.scale": "transformer.norm_f.weight",
    }
    if not config.tied_embeddings:
        top["head.kernel"] = "lm_head.weight"
    names = {
        "attention_norm.scale": "norm_1",
        "mlp_norm.scale": "norm_2",
        "attention.output.kernel": "attn.out_proj",
        "mlp.up.kernel": "ffn.up_proj",
        "mlp.down.kernel": "ffn.down_proj",
    }
    block: dict[str, Source] = {ours: f"{layer}.{theirs}.weight" for ours, theirs in names.items()}
    for place, name in enumerate(("query", "key", "value")):
        block[f"attention.{name}.kernel"] = Part(f"{layer}.attn.Wqkv.weight", place * config.model_dim, total)
    ignored = (r"lm_head\.weight",) if config.tied_embeddings else ()
    return TensorNames(top, block, ignored, optional_prefix="transformer.")


def _read_attention(reader: ConfigReader) -> tuple[float, float | None, float | None]:
    """Return the exponent of the smallest slope, what multiplies scores if it is stated, and the bound of heads."""
    section = reader.section("attn_config")
    if section is None:
        return 8.0, None, None
    for key, only in _ONLY.items():
        if section.boolean(key, default=only) != only:
            raise section.refuse(key, not only, f"transformers has it {str(only).lower()}, whatever a file says")
    section.choice("attn_type", {"multihead_attention": None}, default="multihead_attention")
    clip = section.optional_float("clip_qkv") or None  # 0 is none there
    largest, scale = section.positive_float("alibi_bias_max", default=8.0), section.optional_float("softmax_scale")
    if scale == 0:
        raise section.refuse("softmax_scale", scale, "it must be above 0")
    return section.finish((largest, scale, clip))


MPT = Family("mpt", ("MPTForCausalLM", "MptForCausalLM"), translate, tensor_names)
