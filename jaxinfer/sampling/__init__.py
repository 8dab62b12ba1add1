"""Sampling parameters, keyed noise, logit transforms and draws."""

from jaxinfer.sampling.arrays import NO_TOKEN, SamplingArrays, sampling_arrays
from jaxinfer.sampling.draw import draw, log_probabilities
from jaxinfer.sampling.history import History
from jaxinfer.sampling.margins import margins
from jaxinfer.sampling.noise import ROLE_ACCEPT, ROLE_DRAFT, ROLE_RESIDUAL, ROLE_TARGET, gumbel, request_key, role
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.transforms import transform_logits

__all__ = [
    "NO_TOKEN",
    "ROLE_ACCEPT",
    "ROLE_DRAFT",
    "ROLE_RESIDUAL",
    "ROLE_TARGET",
    "History",
    "SamplingArrays",
    "SamplingParams",
    "draw",
    "gumbel",
    "log_probabilities",
    "margins",
    "request_key",
    "role",
    "sampling_arrays",
    "transform_logits",
]
