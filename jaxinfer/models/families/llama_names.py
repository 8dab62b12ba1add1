"""The tensor names that families derived from Llama share."""

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Source, TensorNames


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
    if config.qk_norm:
        block["attention.query_norm.scale"] = "model.layers.{layer}.self_attn.q_norm.weight"
        block["attention.key_norm.scale"] = "model.layers.{layer}.self_attn.k_norm.weight"
    return TensorNames(top, block, tuple(ignored))
