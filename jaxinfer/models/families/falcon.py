"""Falcon 7B, 40B, 180B, Falcon 2 and Falcon-RW: LayerNorm, parts side by side, q, k and v fused group by group."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import Activation, Alibi, DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.fused_names import rows_by_group
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.slopes import usual_slopes

_DEFAULTS = sizes(65024, 4544, 18176, 32, 71, None, None, 2048)
_OTHER_WORDS = MappingProxyType({"ffn_hidden_size": "intermediate_size", "num_kv_heads": "num_key_value_heads"})
_ACTIVATIONS: Mapping[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` falcon."""
    # Null numbers and those that are not there mean the same.
    changed = {_OTHER_WORDS.get(key, key): value for key, value in config.items() if value is not None}
    reader = ConfigReader(changed, family="falcon")
    has_alibi = reader.boolean("alibi", default=False)
    is_new = reader.boolean("new_decoder_architecture", default=False)
    has_one_head = reader.boolean("multi_query", default=True) and not is_new
    if has_alibi and (is_new or has_one_head):
        raise reader.refuse("alibi", True, "each head must have keys of its own (multi_query false)")
    reader = ConfigReader({**changed, "num_key_value_heads": 1} if has_one_head else changed, family="falcon")
    for key in ("alibi", "new_decoder_architecture", "multi_query"):
        reader.boolean(key, default=False)
    model_dim = reader.positive_int("hidden_size", default=_DEFAULTS["hidden_size"])
    decoder = read_llama_keys(
        reader,
        "falcon",
        {**_DEFAULTS, "intermediate_size": 4 * model_dim},
        bos_token_id=11,
        eos_token_ids=(11,),
        activation=reader.choice("activation", _ACTIVATIONS, default="gelu"),
        tied=True,
        norm_eps=("layer_norm_epsilon", 1e-5),
    )
    bias = reader.boolean("bias", default=False)
    biases = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}
    if has_alibi:
        alibi = Alibi(usual_slopes(decoder.num_heads), rounded=True)
        decoder = replace(decoder, layer_pattern=(LayerKind(rope=None),), alibi=alibi)
    return reader.finish(replace(decoder, norm="layer", block=_form(reader, is_new), gated_mlp=False, **biases))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a falcon checkpoint."""
    layer = "transformer.h.{layer}"
    top: dict[str, Source] = {"embed.embedding": "transformer.word_embeddings.weight"}
    if not config.tied_embeddings:
        top["head.kernel"] = "lm_head.weight"
    first = "ln_attn" if config.block == "parallel_norms" else "input_layernorm"
    second = "ln_mlp" if config.block == "parallel_norms" else "post_attention_layernorm"
    linears = {"attention.output": "self_attention.dense"}
    linears |= {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
    block: dict[str, Source] = {}
    for kind, word, norm_kind in (("kernel", "weight", "scale"), ("bias", "bias", "bias")):
        top[f"final_norm.{norm_kind}"] = f"transformer.ln_f.{word}"
        block[f"attention_norm.{norm_kind}"] = f"{layer}.{first}.{word}"
        block[f"mlp_norm.{norm_kind}"] = f"{layer}.{second}.{word}"
        block |= {f"{ours}.{kind}": f"{layer}.{theirs}.{word}" for ours, theirs in linears.items()}
        fused = rows_by_group(config, f"{layer}.self_attention.query_key_value.{word}")
        block |= {f"attention.{name}.{kind}": part for name, part in fused.items()}
    ignored = (r"lm_head\.weight",) if config.tied_embeddings else ()
    buffers = r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq"
    return TensorNames(top, block, (*ignored, buffers), optional_prefix="transformer.")


def _form(reader: ConfigReader, is_new: bool) -> Any:
    """Return how a block's parts are joined: one norm for both, two norms, or one part after the other."""
    is_parallel = reader.boolean("parallel_attn", default=True)
    norms = reader.positive_int("num_ln_in_parallel_attn", default=2 if is_new else 1, most=2)
    if norms == 2 and not is_new:
        raise reader.refuse("num_ln_in_parallel_attn", norms, "two norms come with new_decoder_architecture alone")
    if is_new and not is_parallel:
        raise reader.refuse("parallel_attn", False, "with new_decoder_architecture parts stand side by side")
    if not is_parallel:
        return "pre_norm"
    return "parallel_norms" if norms == 2 else "parallel"


FALCON = Family("falcon", ("FalconForCausalLM",), translate, tensor_names)
