"""GPT-J and CodeGen: parts side by side after one LayerNorm, neighbouring lanes rotate, and a head with a bias."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.gpt2 import read_gpt2_keys
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_names import interleaved

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "tie_word_embeddings": False,
    }
)
_SHARDS = 4  # CodeGen's rows of q, v and k stand in the order of the devices that trained it


def translate_gptj(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gptj."""
    reader = ConfigReader({**_DEFAULTS, **config}, family="gptj")
    return reader.finish(_read(reader, "gptj"))


def translate_codegen(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` codegen."""
    reader = ConfigReader({**_DEFAULTS, **config}, family="codegen")
    decoder = _read(reader, "codegen")
    if decoder.num_heads % _SHARDS:
        raise reader.refuse("n_head", decoder.num_heads, f"it must be a multiple of {_SHARDS}")
    return reader.finish(decoder)


def gptj_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a gptj checkpoint."""
    return _names(config, {name: f"attn.{name[0]}_proj.weight" for name in ("query", "key", "value")})


def codegen_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a codegen checkpoint: queries, values and keys are fused."""
    total, rows = 3 * config.num_heads * config.head_dim, config.num_heads * config.head_dim // _SHARDS
    fused = {
        name: Part("attn.qkv_proj.weight", place * rows, total, heads=(rows, 3 * rows))
        for place, name in enumerate(("query", "value", "key"))
    }
    return _names(config, fused)


def _read(reader: ConfigReader, family: str) -> DecoderConfig:
    decoder = read_gpt2_keys(reader, family)
    turning = reader.positive_int("rotary_dim", default=64, most=decoder.head_dim)
    if turning % 2:
        raise reader.refuse("rotary_dim", turning, "rotary positions need an even number of lanes")
    return replace(
        decoder,
        layer_pattern=(LayerKind(Rope(10000.0, turning)),),
        learned_positions=None,
        block="parallel",
        qkv_bias=False,
        output_bias=False,
        head_bias=True,
    )


def _names(config: DecoderConfig, heads: Mapping[str, str | Part]) -> TensorNames:
    top: dict[str, Source] = {"embed.embedding": "transformer.wte.weight", "head_bias.bias": "lm_head.bias"}
    top |= {"final_norm.scale": "transformer.ln_f.weight", "final_norm.bias": "transformer.ln_f.bias"}
    if not config.tied_embeddings:
        top["head.kernel"] = "lm_head.weight"
    block: dict[str, Source] = {"attention.output.kernel": "attn.out_proj.weight"}
    block |= {"attention_norm.scale": "ln_1.weight", "attention_norm.bias": "ln_1.bias"}
    for ours, theirs in (("mlp.up", "mlp.fc_in"), ("mlp.down", "mlp.fc_out")):
        block |= {f"{ours}.kernel": f"{theirs}.weight", f"{ours}.bias": f"{theirs}.bias"}
    block |= {f"attention.{name}.kernel": source for name, source in heads.items()}
    ignored = (r"transformer\.h\.\d+\.attn\.((masked_)?bias|causal_mask|embed_positions)",)
    ignored += (r"lm_head\.weight",) if config.tied_embeddings else ()
    named = TensorNames(top, block, ignored)
    return interleaved(config, replace(named, block=named.moved("", "transformer.h.{layer}.").block))


GPTJ = Family("gptj", ("GPTJForCausalLM",), translate_gptj, gptj_names)
CODEGEN = Family("codegen", ("CodeGenForCausalLM",), translate_codegen, codegen_names)
