"""Architecture gemma: the first Gemma. Its norms multiply by one plus the weight that Hugging Face stores."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, TOP
from jaxinfer.checkpoint.gguf.config import FileTensors, add_turn_ends, read_head_dim, read_rotary, read_sizes
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

TURN_ENDS = ("<end_of_turn>",)
# The output matrix is always the embedding.
TIED_TOP: Mapping[str, str] = MappingProxyType(
    {name: TOP[name] for name in ("token_embd.weight", "output_norm.weight")}
)


def read_gemma(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    """Read what all Gemma models share: everything except rotary positions."""
    config = {
        **read_sizes(reader, tensors),
        "head_dim": read_head_dim(reader),
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "attention_bias": False,
    }
    return add_turn_ends(config, reader, TURN_ENDS)


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_gemma(reader, tensors)
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        **config,
        **read_rotary(reader, tensors, config["head_dim"]),
        "hidden_act": "gelu_pytorch_tanh",
    }


GEMMA = Architecture(name="gemma", translate=_translate, top=TIED_TOP, block=BLOCK, norm_shift=1.0, rope_divisors=())
