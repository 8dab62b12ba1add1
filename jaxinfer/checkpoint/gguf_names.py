"""What llama.cpp's architectures call their tensors, by Hugging Face's names: a table for each architecture."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """Tensor names of one architecture.

    ``top`` maps whole names; ``block`` maps the part between ``blk.N.`` and ``.weight`` or ``.bias`` to what follows
    ``model.layers.N.``. ``interleaved`` names the parts of blocks whose output rows llama.cpp's converter reorders for
    interleaved rotary positions, each with the configuration key of its number of heads. ``rope_factors`` is the tensor
    of divisors of the rotary frequencies, which the configuration takes in.
    """

    top: Mapping[str, str]
    block: Mapping[str, str]
    interleaved: Mapping[str, str]
    rope_factors: str = "rope_freqs.weight"


_LLAMA = Architecture(
    top=MappingProxyType(
        {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight",
        }
    ),
    block=MappingProxyType(
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
    ),
    interleaved=MappingProxyType({"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({"llama": _LLAMA})


def translate_name(architecture: Architecture, name: str) -> tuple[str, str | None] | None:
    """Return the Hugging Face name of a tensor, with the configuration key of its number of heads if it is interleaved.

    None means that the architecture has no tensor of that name.
    """
    if name in architecture.top:
        return architecture.top[name], None
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in architecture.block:
        return None
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{architecture.block[part]}.{kind}", architecture.interleaved.get(part)
