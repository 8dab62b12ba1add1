"""Counts the floating-point operations of a step of training an EAGLE-3 drafter, whose loss is a loop."""

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.eagle import EagleShape
from train.loop.operations import forward_operations


def step_operations(
    target: DecoderConfig,
    shape: EagleShape,
    num_rows: int,
    learns_output: bool,
    steps: int,
    num_tokens: int,
    length: int,
    num_predicted: float,
    is_online: bool,
) -> float:
    """Return the operations of a step on ``num_tokens`` in rows of ``length``; ``num_predicted`` are asked for.

    What is learned is multiplied three times, forwards and for the gradients of inputs and weights, what is fixed
    twice. ``num_rows`` are those of the drafter's output matrix. If it ``is_online``, the target runs too.
    """
    config = shape.config
    heads, own_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = 2 * config.model_dim * (heads + 2 * own_heads) + heads * config.model_dim + 2 * length * heads
    layer = attention + 3 * config.model_dim * config.ffn_dim
    output = num_rows * config.model_dim * (3 if learns_output else 2)
    teacher = target.vocab_size * (target.embedding_dim or target.model_dim)
    of_tokens = 3 * (steps * layer + shape.fc_width * config.model_dim)
    drafting = 2.0 * (num_tokens * of_tokens + num_predicted * (steps * output + teacher))
    return drafting + (forward_operations(target, num_tokens, length, 0.0) if is_online else 0.0)
