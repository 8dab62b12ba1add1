"""The chain of logit transforms by NumPy in float64, one node at a time, with sorting."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxinfer.sampling import SamplingParams


def edited(logits_V, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int]):
    """Apply bias, minimum length and penalties."""
    logits = np.array(logits_V, np.float64)
    for token, value in params.logit_bias:
        logits[token] += value
    if len(output) < params.min_new_tokens:
        logits[list(stop_ids)] = -np.inf
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    for token, count in Counter(output).items():
        logits[token] -= params.presence_penalty + params.frequency_penalty * count
    return logits


def truncated(logits_V, params: SamplingParams):
    """Apply temperature, top-k, top-p and min-p; equal logits stay or go together."""
    if params.temperature == 0:
        return logits_V
    logits = logits_V / params.temperature
    keep = np.ones(len(logits), bool)
    if 0 < params.top_k < len(logits):
        keep &= logits >= np.sort(logits)[-params.top_k]
    weights = np.where(keep, np.exp(logits - logits.max()), 0)
    if params.top_p < 1:
        above = np.array([weights[logits > logit].sum() for logit in logits])
        keep &= above < params.top_p * weights.sum()
    if params.min_p > 0:
        keep &= logits >= logits.max() + np.log(params.min_p)
    return np.where(keep, logits, -np.inf)
