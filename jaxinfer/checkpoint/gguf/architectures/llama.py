"""Architecture llama: Llama, Mistral, Mixtral, SmolLM2 and everything else that llama.cpp runs as Llama."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.config import FileTensors, read_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.experts import STACKS, read_expert_counts
from jaxinfer.checkpoint.gguf.metadata import MetadataReader
from jaxinfer.errors import UnsupportedModel

TOP: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
BLOCK: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_BIAS = re.compile(r"blk\.\d+\.(\w+)\.bias")
_ATTENTION = frozenset({"attn_q", "attn_k", "attn_v", "attn_output"})
_MLP = frozenset({"ffn_gate", "ffn_up", "ffn_down"})


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim = read_head_dim(reader)
    biased = {match[1] for name in tensors.names if (match := _BIAS.fullmatch(name))}
    for group in (_ATTENTION, _MLP):
        if 0 < len(group & biased) < len(group):
            present, absent = (", ".join(sorted(parts)) for parts in (group & biased, group - biased))
            raise UnsupportedModel(
                f"{reader.origin}: {present} have biases and {absent} none, which no Llama model of Hugging Face has; "
                "use a conversion to the model's own architecture"
            )
    common = {
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, head_dim),
        "head_dim": head_dim,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
    }
    if reader.optional_int("expert_count") is not None:
        if biased:
            raise UnsupportedModel(f"{reader.origin}: {', '.join(sorted(biased))} have biases, which Mixtral has not")
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        return {**names, **common, **read_expert_counts(reader, "num_local_experts")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **common,
        "attention_bias": biased >= _ATTENTION,
        "mlp_bias": biased >= _MLP,
    }


LLAMA = Architecture(
    name="llama",
    translate=_translate,
    top=TOP,
    block=MappingProxyType({**BLOCK, **STACKS, "ffn_gate_inp": "block_sparse_moe.gate"}),
    interleaved=MappingProxyType({"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}),
)
