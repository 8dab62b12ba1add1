"""Architecture mistral3: Ministral 3, whose queries grow with their place, and the text decoders of Mistral 3.1."""

from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, LLAMA, TOP
from jaxinfer.checkpoint.gguf.architectures.llama_relatives import read_relative
from jaxinfer.checkpoint.gguf.config import FileTensors
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_GROWTH, _LOG_MULTIPLIER = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"


def _translate(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    grows = reader.optional_float(_GROWTH)
    names = ("ministral3", "Ministral3ForCausalLM") if grows else ("mistral", "MistralForCausalLM")
    config = {**read_relative(reader, tensors, *names), "hidden_act": "silu", "sliding_window": None}
    if config.pop("attention_bias"):
        raise reader.refuse("block_count", "queries have biases, which no Mistral has")
    if not grows:
        return config
    if (scaling := config["rope_scaling"]) is None or scaling["rope_type"] != "yarn":
        raise reader.refuse(_GROWTH, "queries that grow have rotary positions that yarn stretches")
    # Both are one number there, which makes a rotation's magnitude 1.
    multiplier = reader.optional_float(_LOG_MULTIPLIER) or 1.0
    both = {"mscale": multiplier, "mscale_all_dim": multiplier}
    return {**config, "rope_scaling": {**scaling, **both, "llama_4_scaling_beta": grows}}


MISTRAL3 = Architecture("mistral3", _translate, TOP, BLOCK, interleaved=LLAMA.interleaved)
