"""GPT-NeoX, Pythia and Dolly: two LayerNorms before parts side by side, and q, k and v fused head by head."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "max_position_embeddings": 2048,
    }
)
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_OLD_WORDS = MappingProxyType({"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gpt_neox."""
    reader = ConfigReader({_OLD_WORDS.get(key, key): value for key, value in config.items()}, family="gpt_neox")
    decoder = read_llama_keys(
        reader,
        "gpt_neox",
        _DEFAULTS,
        bos_token_id=0,
        eos_token_ids=(2,),
        activation=reader.choice("hidden_act", _ACTIVATIONS, default="gelu"),
        norm_eps=("layer_norm_eps", 1e-5),
        rope=partial(read_rope, partial=0.25),
    )
    bias = reader.boolean("attention_bias", default=True)
    form = "parallel_norms" if reader.boolean("use_parallel_residual", default=True) else "pre_norm"
    biases = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": True}
    return reader.finish(replace(decoder, norm="layer", block=form, gated_mlp=False, **biases))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a gpt_neox checkpoint."""
    layer = "gpt_neox.layers.{layer}"
    top: dict[str, Source] = {"embed.embedding": "gpt_neox.embed_in.weight"}
    ignored = [r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)"]
    if config.tied_embeddings:
        ignored.append(r"embed_out\.weight")
    else:
        top["head.kernel"] = "embed_out.weight"
    block: dict[str, Source] = {}
    linears = {
        "attention.output": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    for kind, word, norm_kind in (("kernel", "weight", "scale"), ("bias", "bias", "bias")):
        top[f"final_norm.{norm_kind}"] = f"gpt_neox.final_layer_norm.{word}"
        block[f"attention_norm.{norm_kind}"] = f"{layer}.input_layernorm.{word}"
        block[f"mlp_norm.{norm_kind}"] = f"{layer}.post_attention_layernorm.{word}"
        block |= {f"{ours}.{kind}": f"{layer}.{theirs}.{word}" for ours, theirs in linears.items()}
        for place, name in enumerate(("query", "key", "value")):
            rows, total = config.head_dim, 3 * config.num_heads * config.head_dim
            fused = f"{layer}.attention.query_key_value.{word}"
            block[f"attention.{name}.{kind}"] = Part(fused, place * rows, total, heads=(rows, 3 * rows))
    return TensorNames(top, block, tuple(ignored))


GPT_NEOX = Family("gpt_neox", ("GPTNeoXForCausalLM",), translate, tensor_names)
