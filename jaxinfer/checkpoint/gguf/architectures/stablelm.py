"""Architecture stablelm: StableLM without norms of heads, which the converter stacks."""

from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, read_derived_head_dim, read_partial_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    _, rotary_share = read_partial_rotary(reader, read_derived_head_dim(reader))
    # Files of models whose parts follow one another may say true: like llama.cpp, go by the second norm.
    reader.boolean("use_parallel_residual", default=False)
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        **read_sizes(reader, tensors),
        "rope_theta": reader.positive_float("rope.freq_base", default=10000.0),
        "partial_rotary_factor": rotary_share,
        "layer_norm_eps": reader.positive_float("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "use_qkv_bias": "blk.0.attn_q.bias" in tensors.names,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors.names,
    }


STABLELM = Architecture(
    name="stablelm",
    translate=_translate,
    top=MappingProxyType({**TOP, "output_norm.bias": "model.norm.bias"}),
    block=BLOCK,
    rope_divisors=(),
)
