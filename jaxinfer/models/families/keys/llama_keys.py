"""The ``config.json`` keys that families derived from Llama share."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxinfer.models.config import Activation, DecoderConfig, LayerKind, Rope
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.rope import read_rope

# Llama's values for absent keys.
LLAMA_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }
)


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)


def sizes(*numbers: int | None) -> Mapping[str, int]:
    """Return a family's values for absent keys: vocabulary, widths, layers, heads, head_dim and positions, in order.

    Without a number of key/value heads or a ``head_dim`` (None) there is no default for them.
    """
    named = zip(_SIZES, numbers, strict=True)
    return MappingProxyType({key: number for key, number in named if number is not None})


def read_clip(reader: ConfigReader) -> float | None:
    """Return the bound of queries, keys and values, None without one."""
    return reader.positive_float("clip_qkv") if reader.has("clip_qkv") else None


def read_llama_keys(
    reader: ConfigReader,
    family: str,
    defaults: Mapping[str, int],
    bos_token_id: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    *,
    activation: Activation | None = None,
    tied: bool = False,
    norm_eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    rope: Callable[[ConfigReader, int, int], Rope] = read_rope,
) -> DecoderConfig:
    """Return a decoder without biases whose layers all attend to the whole sequence.

    ``defaults`` are the family's values for absent keys. An absent or null ``num_key_value_heads`` without a default
    means as many as query heads; an absent ``head_dim`` without a default means ``hidden_size`` divided by the heads.
    ``activation`` None reads ``hidden_act``. ``tied`` is the default for tying the output matrix to the embedding,
    ``norm_eps`` the key of the norms' epsilon and its default.
    """
    num_heads = reader.positive_int("num_attention_heads", defaults["num_attention_heads"])
    model_dim = reader.positive_int("hidden_size", defaults["hidden_size"])
    absent = num_heads if reader.is_null("num_key_value_heads") else defaults.get("num_key_value_heads", num_heads)
    num_kv_heads = reader.positive_int("num_key_value_heads", absent)
    head_dim = reader.positive_int("head_dim", defaults.get("head_dim", model_dim // num_heads))
    max_position = reader.positive_int("max_position_embeddings", defaults["max_position_embeddings"])
    if num_heads % num_kv_heads:
        raise reader.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    if head_dim % 2:
        raise reader.refuse("head_dim", head_dim, "rotary positions need an even head_dim")
    if activation is None:
        activation = reader.choice("hidden_act", {"silu": "silu", "swish": "silu", "relu": "relu"}, default="silu")
    return DecoderConfig(
        family=family,
        vocab_size=reader.positive_int("vocab_size", defaults["vocab_size"]),
        num_layers=reader.positive_int("num_hidden_layers", defaults["num_hidden_layers"], most=1000),
        model_dim=model_dim,
        ffn_dim=reader.positive_int("intermediate_size", defaults["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=reader.positive_float(norm_eps[0], default=norm_eps[1]),
        layer_pattern=(LayerKind(rope(reader, max_position, head_dim)),),
        activation=activation,
        tied_embeddings=reader.boolean("tie_word_embeddings", default=tied),
        bos_token_id=reader.optional_token("bos_token_id", default=bos_token_id),
        eos_token_ids=reader.tokens("eos_token_id", default=eos_token_ids),
    )
