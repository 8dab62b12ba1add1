"""What a decoder is: its sizes and its variants, independent of any checkpoint format."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies stretch past the length that a model was first trained on.

    ``linear`` divides positions by ``factor`` (Chen et al., 2306.15595); ``dynamic`` is NTK-aware scaling of the base
    with the length of the text; ``llama3`` scales low frequencies only; ``yarn`` is Peng et al., 2309.00071;
    ``longrope`` divides each frequency by one of ``short_factors`` up to ``original_max_position`` and of
    ``long_factors`` past it (Ding et al., 2402.13753). Lengths are in tokens. Fields that a kind does not use keep
    their defaults.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rope:
    """Rotary positions of the first ``dim`` lanes of a head; the others do not rotate."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class LayerKind:
    """What sets the attention of some layers apart.

    ``window`` is how many tokens a query sees, itself included; None is all before it. ``rope`` None means no rotary
    positions.
    """

    rope: Rope | None
    window: int | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """The network of one decoder-only model: static, hashable, and free of how or where it runs.

    Widths are in elements, ``max_position`` in tokens. ``layer_pattern`` holds the layers' kinds and repeats over them:
    one kind for all, two for alternating windows, or one a layer. ``eos_token_ids`` are the ids that end a text;
    ``bos_token_id`` is None for models that have none.

    ``block`` is how a block joins its parts to the residual stream: ``pre_norm`` (a norm before each part),
    ``sandwich`` (one before and one after), ``post_norm`` (one after each sum), ``parallel`` (one norm, both parts side
    by side). ``norm``: ``rms``, ``rms_plus_one`` (weights stored less one), ``layer`` (LayerNorm with a bias) or
    ``plain_layer`` (LayerNorm without weights). ``qk_norm`` puts a norm on each head of queries and keys.
    ``attention_scale`` multiplies the scores (default ``head_dim ** -0.5``), ``scores_by_depth`` divides those of layer
    n by n + 1; soft-caps bound scores and logits by ``cap * tanh(x / cap)``. ``learned_positions`` is the row of the
    position table where the text begins, None without a table. ``embedding_dim`` is the width of the embedding and the
    head where it differs from the blocks', with projections between. The last ``vocab_padding`` of the ``vocab_size``
    rows of these are no tokens, and never drawn.
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
    layer_pattern: tuple[LayerKind, ...]
    block: Literal["pre_norm", "sandwich", "post_norm", "parallel"] = "pre_norm"
    norm: Literal["rms", "rms_plus_one", "layer", "plain_layer"] = "rms"
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    scores_by_depth: bool = False
    final_softcap: float | None = None
    embedding_scale: float | None = None
    embedding_dim: int | None = None
    learned_positions: int | None = None
    final_norm: bool = True
    tied_embeddings: bool = False
    vocab_padding: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def query_heads_per_kv_head(self) -> int:
        """G: how many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_tokens(self) -> int:
        """How many ids are tokens; those of the vocabulary's padding are not."""
        return self.vocab_size - self.vocab_padding

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return tuple(self.layer_pattern[layer % len(self.layer_pattern)] for layer in range(self.num_layers))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds, in the order in which layers first have them."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def longest_text(self) -> int | None:
        """How many tokens the positions reach; None where their rotation adapts to any length.

        That is past ``max_position`` where a yarn recipe was added to a model that was trained on shorter texts.
        """
        if self.learned_positions is not None:
            return self.max_position
        ropes = [kind.rope for kind in self.kinds]
        scalings = [rope.scaling for rope in ropes if rope is not None and rope.scaling is not None]
        if any(scaling.kind == "dynamic" for scaling in scalings):
            return None
        yarns = [scaling for scaling in scalings if scaling.kind == "yarn"]
        return max([self.max_position, *(int(yarn.factor * yarn.original_max_position) for yarn in yarns)])


def shortest_pattern(layers: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Return the shortest pattern that repeats to these layers; the last repetition may be cut."""
    for period in range(1, len(layers)):
        if all(kind == layers[index % period] for index, kind in enumerate(layers)):
            return layers[:period]
    return layers
