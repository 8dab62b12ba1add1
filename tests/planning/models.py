"""Published models by their sizes alone, and one of them where it is planned for."""

from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.planning.deployment import Deployment

LLAMA_2_7B = DecoderConfig(
    family="llama",
    vocab_size=32000,
    num_layers=32,
    model_dim=4096,
    ffn_dim=11008,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position=4096,
    norm_eps=1e-5,
    layer_pattern=(LayerKind(Rope(1e4, 128)),),
    bos_token_id=1,
    eos_token_ids=(2,),
)
LLAMA_3_8B = DecoderConfig(
    family="llama",
    vocab_size=128256,
    num_layers=32,
    model_dim=4096,
    ffn_dim=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    norm_eps=1e-5,
    layer_pattern=(LayerKind(Rope(5e5, 128)),),
    bos_token_id=128000,
    eos_token_ids=(128001,),
)

LLAMA_68M = DecoderConfig(
    family="llama",
    vocab_size=32000,
    num_layers=2,
    model_dim=768,
    ffn_dim=3072,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_position=2048,
    norm_eps=1e-6,
    layer_pattern=(LayerKind(Rope(1e4, 64)),),
)

EIGHT = Deployment(LLAMA_2_7B, "v5e:2x4", MeshConfig(tensor=8), batch=8, max_len=2046, prompt_tokens=16, nodes=2)
