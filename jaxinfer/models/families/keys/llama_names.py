"""The tensor names that families derived from Llama share."""

from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part, Source, TensorNames, each_name

_TURNED = ("query.kernel", "query.bias", "query_norm.scale", "key.kernel", "key.bias", "key_norm.scale")


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a checkpoint with Llama's layout, and norms of queries and keys if it has any."""
    top: dict[str, Source] = {"embed.embedding": "model.embed_tokens.weight", "final_norm.scale": "model.norm.weight"}
    ignored = [r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"]
    if config.tied_embeddings:
        ignored.append(r"lm_head\.weight")
    else:
        top["head.kernel"] = "lm_head.weight"
    block: dict[str, Source] = {
        "attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
        "mlp_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    }
    linears = (
        ("attention", "self_attn", {"query": "q_proj", "key": "k_proj", "value": "v_proj"}, config.qkv_bias),
        ("attention", "self_attn", {"output": "o_proj"}, config.output_bias),
        ("mlp", "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}, config.mlp_bias),
    )
    for ours, theirs, names, has_bias in linears:
        for name, tensor in names.items():
            block[f"{ours}.{name}.kernel"] = f"model.layers.{{layer}}.{theirs}.{tensor}.weight"
            if has_bias:
                block[f"{ours}.{name}.bias"] = f"model.layers.{{layer}}.{theirs}.{tensor}.bias"
    if config.norm in ("layer", "layer_plus_one"):
        top["final_norm.bias"] = "model.norm.bias"
        block["attention_norm.bias"] = "model.layers.{layer}.input_layernorm.bias"
        block["mlp_norm.bias"] = "model.layers.{layer}.post_attention_layernorm.bias"
    if config.qk_norm not in (None, "rotated_heads"):
        block["attention.query_norm.scale"] = "model.layers.{layer}.self_attn.q_norm.weight"
        block["attention.key_norm.scale"] = "model.layers.{layer}.self_attn.k_norm.weight"
    return TensorNames(top, block, tuple(ignored))


def renamed(config: DecoderConfig, block: Mapping[str, Source]) -> TensorNames:
    """Return Llama's names, but for some parameters of a block: the names after ``model.layers.{layer}.``."""
    names = tensor_names(config)
    own = {path: each_name(source, "model.layers.{{layer}}.{}".format) for path, source in block.items()}
    return replace(names, block={**names.block, **own})


def interleaved(config: DecoderConfig, names: TensorNames) -> TensorNames:
    """Return the names of a checkpoint whose rotary positions turn neighbouring lanes of queries and keys."""
    (turning,) = {kind.rope.dim for kind in config.kinds if kind.rope is not None}
    block = dict(names.block)
    for path in (f"attention.{name}" for name in _TURNED):
        if path in block:
            source = block[path]
            assert not isinstance(source, tuple)
            part = source if isinstance(source, Part) else Part(source)
            block[path] = replace(part, rotary=(config.head_dim, turning))
    return replace(names, block=block)
