"""Counts the floating-point operations of a pass over texts, from the sizes of its products."""

from jaxinfer.models.config import DecoderConfig


def forward_operations(config: DecoderConfig, num_tokens: int, length: int, num_outputs: float = 1.0) -> float:
    """Return the operations of a forward pass of ``num_tokens`` in rows of ``length``.

    Every weight of a product counts two operations. Attention counts in full, its upper half included. The output
    matrix is used ``num_outputs`` times.
    """
    attention = config.model_dim * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    feed_forward = config.model_dim * config.ffn_dim * (3 if config.gated_mlp else 2)
    scores = 2 * length * config.num_heads * config.head_dim
    output = config.vocab_size * (config.embedding_dim or config.model_dim)
    return 2.0 * num_tokens * (config.num_layers * (attention + feed_forward + scores) + num_outputs * output)
