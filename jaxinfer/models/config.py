"""A decoder's sizes and variants, independent of checkpoint formats."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from jaxinfer.models.latent import Latent

RopeKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "xielu"]
NormKind = Literal["rms", "rms_plus_one", "plain_rms", "layer", "layer_plus_one", "scaled_layer", "plain_layer"]
HeadNorm = Literal["head", "biased_head", "own_head", "all_heads", "rotated_heads"]
Scoring = Literal["softmax", "chosen_softmax", "sigmoid", "chosen_sigmoid", "sparse_mixer"]
# Norms whose weights are stored minus one.
NORMS_PLUS_ONE = ("rms_plus_one", "layer_plus_one")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled for sequences longer than those first trained on.

    ``linear`` divides positions by ``factor`` (Chen et al., 2306.15595). ``dynamic`` is NTK-aware scaling: the base
    grows with the sequence's length. ``llama3`` scales only low frequencies. ``yarn`` is Peng et al., 2309.00071.
    ``longrope`` divides each frequency by one of ``short_factors`` up to ``original_max_position``, and by one of
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
class Sharpening:
    """Queries grow with their place: by ``strength * log(1 + n)`` at the n-th multiple of ``interval`` tokens.

    So scores keep their contrast in long texts (2501.19399). With ``ahead`` 1, the token that completes an interval
    counts in the next one (Llama 4).
    """

    strength: float
    interval: int
    ahead: int = 1


@dataclass(frozen=True)
class Alibi:
    """Scores of head n fall with the distance of a key, by ``slopes[n]`` a token (Press et al., 2108.12409).

    Every head has its own keys. Where they are ``rounded``, a slope, a position and their product are bfloat16 numbers,
    and the product is added before scores are scaled (Falcon).
    """

    slopes: tuple[float, ...]
    rounded: bool = False


@dataclass(frozen=True)
class LayerKind:
    """The attention variant of some layers.

    ``window`` is how many tokens a query attends to at most, itself included; None means all before it. A ``chunked``
    window does not slide: it begins anew at every multiple of its width. ``rope`` None means no rotary positions.
    """

    rope: Rope | None
    window: int | None = None
    chunked: bool = False
    sharpening: Sharpening | None = None


@dataclass(frozen=True)
class Experts:
    """A feed-forward layer of ``num_experts`` small ones, of which a router chooses ``per_token`` for each token.

    Widths are in elements; ``shared_dim`` is that of an expert that every token has beside the chosen ones, 0 without
    one, and ``shared_gate`` multiplies what it adds by a sigmoid of the token (Qwen2-MoE). Of a token's logits,
    ``scoring`` makes the experts' scores: a ``softmax`` over all (Switch Transformers, 2101.03961), over the chosen
    alone (``chosen_softmax``), a ``sigmoid`` of each (DeepSeek-V3, 2412.19437), or of the chosen's, which the logits
    choose (``chosen_sigmoid``). A ``sparse_mixer`` (2409.12136) makes a softmax for each choice, over the experts not
    chosen before whose logits are no further than ``spread`` below the best, as a share of the larger of the two. The
    best scores choose, the lower expert among equals. ``correction_bias`` is added for the choice only. With several
    ``groups``, the choice is among the experts of the ``kept_groups`` whose best score (``best``, DeepSeek-V2,
    2405.04434) or sum of two best (``two_best``) is largest. A chosen expert's result is multiplied by its score, with
    ``normalised`` divided by the sum of the chosen ones', and by ``scale``; with ``scales_inputs`` its input is instead
    (Llama 4). ``bias`` adds biases to the logits and to the products of every expert. With a ``limit``, gates are
    bounded by it from above, what they multiply on both sides, and one is added to the latter (gpt-oss, 2508.10925).
    ``layer_pattern`` says which layers have experts; it repeats over the layers, and the others are dense.
    """

    num_experts: int
    per_token: int
    ffn_dim: int
    shared_dim: int = 0
    shared_gate: bool = False
    scoring: Scoring = "softmax"
    normalised: bool = False
    scale: float = 1.0
    scales_inputs: bool = False
    spread: float = 0.0
    correction_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["best", "two_best"] = "two_best"
    bias: bool = False
    limit: float | None = None
    layer_pattern: tuple[bool, ...] = (True,)

    def share_read(self, num_tokens: int) -> float:
        """Return which part of the experts some of so many tokens go to: the expected one, if all are as likely."""
        return 1 - (1 - self.per_token / self.num_experts) ** num_tokens


@dataclass(frozen=True)
class DecoderConfig:
    """The network of a decoder-only model: static and hashable. It does not say how or where the model runs.

    Widths are in elements, ``max_position`` in tokens. ``layer_pattern`` holds the layers' kinds and repeats over the
    layers: one kind for all, two for alternating windows, or one per layer. ``eos_token_ids`` are the ids that end a
    sequence. ``bos_token_id`` is None for models without one.

    ``block`` is the placement of norms around a block's two parts, attention and feed-forward: ``pre_norm`` (before
    each part), ``sandwich`` (before and after each), ``output_norm`` (after each, before the sum), ``post_norm`` (after
    each sum) ``parallel`` (one norm, both parts side by side) or ``parallel_norms`` (two norms of the same inputs).
    ``norm`` is ``rms``, ``rms_plus_one`` (weights stored minus one), ``layer`` (LayerNorm with a bias),
    ``layer_plus_one``, ``scaled_layer`` (without a bias) or ``plain_layer`` (without weights too). ``activation``
    ``xielu`` has parameters of each layer (`jaxinfer.models.xielu`). ``qk_norm`` adds norms without biases to queries
    and keys: ``head`` to each head, with the same weights (``biased_head``: LayerNorm with a bias), ``own_head`` to
    each head with its own, ``all_heads`` to all heads as one vector; ``rotated_heads`` adds RMS norms without weights
    to each head, in layers that rotate (Llama 4); ``norm_after_rotation`` says that heads are normed when they have
    been rotated. ``clip_qkv`` bounds queries and keys, after their norms and before their rotation, and values on both
    sides. ``attention_gate`` multiplies what attention mixes by sigmoids of a product of the block's inputs (gated
    attention, 2505.06708). ``inner_norms`` norm what the output and the down matrices read (BitNet, 2504.12285).
    ``residual_scale`` multiplies each
    part's result before its sum, ``embedding_scale`` the embedding, ``logit_scale`` the logits. ``attention_scale``
    multiplies scores (default ``head_dim ** -0.5``); ``scores_by_depth`` divides the scores of layer n by n + 1;
    soft-caps bound scores and logits by ``cap * tanh(x / cap)``; ``attention_sinks`` are learned scores, one of each
    head, that take a part of the weights and have no value (gpt-oss, 2508.10925). ``learned_positions`` is the row of
    the position table for a sequence's first token, None without a table; ``sinusoids`` is the number whose sines and
    cosines are added to a sequence's first token (Vaswani et al., 1706.03762); ``alibi`` has scores fall with the
    distance in all layers; ``embedding_norm`` norms the embedding. ``embedding_dim`` is the width of the embedding and
    the output matrix if it differs from the blocks' width; projections join them. The last
    ``vocab_padding`` of their ``vocab_size`` rows are padding and never drawn. ``experts`` describes the layers whose
    feed-forward part is a mixture; ``ffn_dim`` is the width of the others. With ``latent`` (`jaxinfer.models.latent`)
    the one key/value head is a row of the cache, ``head_dim`` its width, and there is an ``attention_scale``.
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
    block: Literal["pre_norm", "sandwich", "output_norm", "post_norm", "parallel", "parallel_norms"] = "pre_norm"
    norm: NormKind = "rms"
    activation: Activation = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: HeadNorm | None = None
    norm_after_rotation: bool = False
    clip_qkv: float | None = None
    attention_gate: bool = False
    inner_norms: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    scores_by_depth: bool = False
    attention_sinks: bool = False
    residual_scale: float | None = None
    final_softcap: float | None = None
    embedding_scale: float | None = None
    logit_scale: float | None = None
    embedding_dim: int | None = None
    learned_positions: int | None = None
    sinusoids: int | None = None
    alibi: Alibi | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    tied_embeddings: bool = False
    vocab_padding: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def query_heads_per_kv_head(self) -> int:
        """G: how many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def own_heads(self) -> tuple[int, int]:
        """The key/value heads of a drafter's attention beside this model's, and their width."""
        if self.latent is None:
            return self.num_kv_heads, self.head_dim
        return self.num_heads, self.latent.value_dim

    @property
    def head_norm(self) -> NormKind:
        """The kind of norm of queries and keys."""
        if self.qk_norm == "rotated_heads":
            return "plain_rms"
        if self.qk_norm == "biased_head":
            return "layer"
        return "scaled_layer" if self.norm == "layer" else self.norm

    @property
    def neutral_scale(self) -> float:
        """The weight with which a norm does nothing but norm."""
        return 0.0 if self.norm in NORMS_PLUS_ONE else 1.0

    @property
    def num_tokens(self) -> int:
        """The number of token ids, without the vocabulary's padding."""
        return self.vocab_size - self.vocab_padding

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return tuple(self.layer_pattern[layer % len(self.layer_pattern)] for layer in range(self.num_layers))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """Whether each layer's feed-forward part is a mixture of experts."""
        pattern = (False,) if self.experts is None else self.experts.layer_pattern
        return tuple(pattern[layer % len(pattern)] for layer in range(self.num_layers))

    @property
    def bodies(self) -> tuple[tuple[LayerKind, bool], ...]:
        """What every layer computes: its kind, and whether it has experts.

        Layers that differ in their feed-forward part alone are of one kind, whose cache they share.
        """
        return tuple(zip(self.layers, self.sparse_layers))

    @property
    def longest_text(self) -> int | None:
        """The longest sequence that the positions support; None if their rotation adapts to any length.

        It exceeds ``max_position`` if yarn scaling was added to a model trained on shorter sequences.
        """
        if self.learned_positions is not None:
            return self.max_position
        ropes = [kind.rope for kind in self.kinds]
        scalings = [rope.scaling for rope in ropes if rope is not None and rope.scaling is not None]
        if any(scaling.kind == "dynamic" for scaling in scalings):
            return None
        yarns = [scaling for scaling in scalings if scaling.kind == "yarn"]
        return max([self.max_position, *(int(yarn.factor * yarn.original_max_position) for yarn in yarns)])


_Layer = TypeVar("_Layer", bound=Hashable)


def shortest_pattern(layers: tuple[_Layer, ...]) -> tuple[_Layer, ...]:
    """Return the shortest pattern that repeats to these layers; its last repetition may be incomplete."""
    for period in range(1, len(layers)):
        if all(kind == layers[index % period] for index, kind in enumerate(layers)):
            return layers[:period]
    return layers


def shallower(config: DecoderConfig, count: int) -> DecoderConfig:
    """Return the decoder of the first ``count`` layers, at least one and no more than there are, and of the rest."""
    layers, sparse = config.layers[:count], config.sparse_layers[:count]
    experts = config.experts if any(sparse) else None
    experts = experts and replace(experts, layer_pattern=shortest_pattern(sparse))
    return replace(config, num_layers=count, layer_pattern=shortest_pattern(layers), experts=experts)
