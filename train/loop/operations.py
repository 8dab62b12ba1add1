"""Counts the floating-point operations of a pass over texts, from the sizes of its products."""

from jaxinfer.models.config import DecoderConfig


def forward_operations(config: DecoderConfig, num_tokens: int, length: int, num_outputs: float = 1.0) -> float:
    """Return the operations of a forward pass of ``num_tokens`` in rows of ``length``.

    Every weight of a product counts two operations. Attention counts in full, its upper half included. The output
    matrix is used ``num_outputs`` times.
    """
    attention = config.model_dim * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    scores = 2 * length * config.num_heads * config.head_dim
    output = config.vocab_size * (config.embedding_dim or config.model_dim)
    feed_forward = sum(_feed_forward(config, is_sparse) for is_sparse in config.sparse_layers)
    layers = config.num_layers * (attention + scores) + feed_forward
    return 2.0 * num_tokens * (layers + num_outputs * output)


def _feed_forward(config: DecoderConfig, is_sparse: bool) -> int:
    """Return the weights that each token is multiplied with in a layer's feed-forward part."""
    experts = config.experts
    if experts is None or not is_sparse:
        return config.model_dim * config.ffn_dim * (3 if config.gated_mlp else 2)
    routed = 3 * (experts.per_token * experts.ffn_dim + experts.shared_dim)
    return config.model_dim * (experts.num_experts + routed + experts.shared_gate)
