"""Divergences between the teacher's distribution P and the student's Q, in nats, from log-probabilities.

A draft is accepted with probability ``sum min(P, Q)``, which is one minus total variation (Leviathan et al.,
2211.17192). Which divergence raises it most depends on the task (DistillSpec, 2310.08461).
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp

from jaxinfer.notation import Array, Float

LogProbs = Float[Array, "*rows V"]
Divergence = Callable[[LogProbs, LogProbs], Float[Array, "*rows"]]


def forward_kl(teacher: LogProbs, student: LogProbs) -> Float[Array, "*rows"]:
    """Return KL(P || Q)."""
    return _relative_entropy(teacher, student)


def reverse_kl(teacher: LogProbs, student: LogProbs) -> Float[Array, "*rows"]:
    """Return KL(Q || P)."""
    return _relative_entropy(student, teacher)


def jensen_shannon(teacher: LogProbs, student: LogProbs, beta: float = 0.5) -> Float[Array, "*rows"]:
    """Return ``beta KL(P || M) + (1 - beta) KL(Q || M)`` with ``M = beta P + (1 - beta) Q`` (GKD, 2306.13649).

    This would be zero for ``beta`` 0 and 1. There it returns the limits of its direction instead: the forward KL at 0,
    the reverse KL at 1.
    """
    if beta == 0:
        return forward_kl(teacher, student)
    if beta == 1:
        return reverse_kl(teacher, student)
    mixture = jnp.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _relative_entropy(teacher, mixture) + (1 - beta) * _relative_entropy(student, mixture)


def total_variation(teacher: LogProbs, student: LogProbs) -> Float[Array, "*rows"]:
    """Return ``1/2 sum |P - Q|``: the probability that a draft from Q is rejected."""
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(teacher) - jnp.exp(student)), axis=-1)


def acceptance(teacher: LogProbs, student: LogProbs) -> Float[Array, "*rows"]:
    """Return ``sum min(P, Q)``."""
    return jnp.sum(jnp.exp(jnp.minimum(teacher, student)), axis=-1)


DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jensen_shannon": jensen_shannon,
        "total_variation": total_variation,
    }
)


def _relative_entropy(of: LogProbs, to: LogProbs) -> Float[Array, "*rows"]:
    return jnp.sum(jnp.exp(of) * (of - to), axis=-1)
