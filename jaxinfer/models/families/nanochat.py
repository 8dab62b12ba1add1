"""nanochat: norms without weights, of the embedding and of rotated heads too, and a squared ReLU without a gate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.gemma_keys import read_softcap
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes

_DEFAULTS = sizes(50304, 768, 8192, 12, 6, None, None, 2048)
_ACTIVATIONS: Mapping[str, Activation] = {"relu2": "relu_squared"}


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` nanochat."""
    reader = ConfigReader(config, family="nanochat")
    activation = reader.choice("hidden_act", _ACTIVATIONS, default="relu2")
    decoder = read_llama_keys(reader, "nanochat", _DEFAULTS, 0, (1,), activation=activation)
    bias = reader.boolean("attention_bias", default=False)
    return reader.finish(
        replace(
            decoder,
            norm="plain_rms",
            embedding_norm=True,
            qk_norm="rotated_heads",
            gated_mlp=False,
            qkv_bias=bias,
            output_bias=bias,
            final_softcap=read_softcap(reader, "final_logit_softcapping", default=15.0),
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's without norms; queries and keys turn backwards, so that their halves change places."""
    names = llama_names.tensor_names(config)
    top = {path: source for path, source in names.top.items() if path != "final_norm.scale"}
    absent = ("attention_norm.scale", "mlp_norm.scale", "mlp.gate.kernel")
    block: dict[str, Source] = {path: source for path, source in names.block.items() if path not in absent}
    block |= {f"mlp.{ours}.kernel": f"model.layers.{{layer}}.mlp.{theirs}.weight" for ours, theirs in _FEED_FORWARD}
    for path, source in list(block.items()):
        if isinstance(source, str) and path.startswith(("attention.query.", "attention.key.")):
            block[path] = Part(source, rotary=(config.head_dim, config.head_dim), backwards=True)
    return replace(names, top=top, block=block)


_FEED_FORWARD = (("up", "fc1"), ("down", "fc2"))
NANOCHAT = Family("nanochat", ("NanoChatForCausalLM",), translate, tensor_names)
