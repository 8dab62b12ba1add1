"""What a decoder is: its sizes and its variants, independent of any checkpoint format."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies stretch past the length that a model was first trained on.

    ``linear`` divides positions by ``factor`` (Chen et al., 2306.15595); ``dynamic`` is NTK-aware scaling of the base
    with the length of the text; ``llama3`` scales low frequencies only; ``yarn`` is Peng et al., 2309.00071.
    Lengths are in tokens. Fields that a kind does not use keep their defaults.
    """

    kind: RopeKind
    factor: float
    original_max_position: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class DecoderConfig:
    """The network of one decoder-only model: static, hashable, and free of how or where it runs.

    Widths are in elements, ``max_position`` in tokens. ``eos_token_ids`` are the ids that end a text;
    ``bos_token_id`` is None for models that have none.
    """

    family: str
    vocab_size: int
    num_layers: int
    model_dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def query_heads_per_kv_head(self) -> int:
        """G: how many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads
