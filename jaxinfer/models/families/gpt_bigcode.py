"""StarCoder 1 and SantaCoder: GPT-2 with one head of keys and values, and kernels stored ``[out, in]``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import gpt2
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.fused_names import rows_by_group


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gpt_bigcode."""
    reader = ConfigReader({"activation_function": "gelu_pytorch_tanh", **config}, family="gpt_bigcode")
    has_one_head = reader.boolean("multi_query", default=True)
    decoder = gpt2.read_gpt2_keys(reader, "gpt_bigcode")
    scales = reader.boolean("scale_attn_weights", default=True)
    num_kv_heads = 1 if has_one_head else decoder.num_heads
    stated = reader.positive_int("num_key_value_heads", default=num_kv_heads)
    if stated != num_kv_heads:
        raise reader.refuse("num_key_value_heads", stated, f"multi_query makes it {num_kv_heads}")
    return reader.finish(replace(decoder, num_kv_heads=num_kv_heads, attention_scale=None if scales else 1.0))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: GPT-2's, none of them transposed, and q, k and v fused in groups."""
    names = gpt2.tensor_names(config)
    block: dict[str, Source] = {
        path: source.tensor if isinstance(source, Part) else source for path, source in names.block.items()
    }
    for kind, word in (("kernel", "weight"), ("bias", "bias")):
        fused = rows_by_group(config, f"transformer.h.{{layer}}.attn.c_attn.{word}")
        block |= {f"attention.{name}.{kind}": part for name, part in fused.items()}
    return replace(names, block=block)


GPT_BIGCODE = Family("gpt_bigcode", ("GPTBigCodeForCausalLM",), translate, tensor_names)
