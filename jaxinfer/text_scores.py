"""What a model says of texts that are there already: how probable their tokens are, what they look like inside, and,
by a value head, what they are worth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.cache.layouts import DenseLayout, PagedLayout
from jaxinfer.checkpoint.value_head import read_value_head
from jaxinfer.decoding.batch import pad_texts
from jaxinfer.decoding.scoring import hidden_states, text_scores, text_values
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_checks import check_ids
from jaxinfer.notation import Float

# Programs are made for so many alternatives, of which fewer are taken.
_COUNTS = (0, 5, 20)
MOST_ALTERNATIVES = _COUNTS[-1]


@dataclass(frozen=True)
class TextScores:
    """Entry ``i`` is of token ``i + 1``, given all before it; by the raw logits, as generation reports them.

    ``best`` has the most probable tokens there with their log-probabilities, the most probable first, the lowest id
    first among equals.
    """

    logprobs: tuple[float, ...]
    best: tuple[tuple[tuple[int, float], ...], ...]


def score_text(lm: LanguageModel, ids: Sequence[int], alternatives: int = 0, adapter: str | None = None) -> TextScores:
    """Return the log-probabilities of a text's tokens, and ``alternatives`` most probable tokens in the place of each.

    ``adapter`` names a loaded adapter. Where a token's bits do not depend on its company (a CPU), they are those that
    generation gives it. Raises InvalidOption for ids or a length that the model does not have, and for a model on a
    mesh.
    """
    if not 0 <= alternatives <= MOST_ALTERNATIVES:
        raise InvalidOption(f"{alternatives} alternatives are not 0 to {MOST_ALTERNATIVES}")
    num_tokens = lm.config.num_tokens
    count = min(next(count for count in _COUNTS if count >= alternatives), num_tokens)
    arguments = _padded(lm, ids, adapter)
    program = partial(text_scores, lm.programs.decoder, count)
    found = lm.programs.run(("text_scores", count), program, (), lm.adapted_params, *arguments)
    last = len(ids) - 1
    logprobs_T, ids_TC, best_TC = (np.asarray(part)[0, :last] for part in found)
    best = tuple(tuple(zip(ids, values)) for ids, values in zip(ids_TC[:, :alternatives].tolist(), best_TC.tolist()))
    return TextScores(tuple(logprobs_T.tolist()), best)


def embed_text(lm: LanguageModel, ids: Sequence[int], adapter: str | None = None) -> Float[np.ndarray, " D"]:
    """Return the mean of a text's hidden states after the final norm, scaled to length 1, in float32.

    Raises as `score_text` does.
    """
    program = partial(hidden_states, lm.programs.decoder)
    hidden_BTD = lm.programs.run("hidden_states", program, (), lm.adapted_params, *_padded(lm, ids, adapter))
    mean_D = np.asarray(hidden_BTD)[0, : len(ids)].astype(np.float64).mean(axis=0)
    length = np.linalg.norm(mean_D)
    return (mean_D / (length or 1.0)).astype(np.float32)


def value_text(
    lm: LanguageModel, ids: Sequence[int], folder: str | Path, adapter: str | None = None
) -> tuple[float, ...]:
    """Return by the value head in a folder what a text is worth at each token: entry ``i`` after token ``i``.

    Raises as `score_text` does, and as `jaxinfer.checkpoint.value_head.read_value_head` for a head that does not fit.
    """
    head = read_value_head(Path(folder).expanduser(), lm.config, lambda: lm.base_fingerprint)
    arguments = *_padded(lm, ids, adapter), head
    program = partial(text_values, lm.programs.decoder)
    values_BT = lm.programs.run("text_values", program, (), lm.adapted_params, *arguments)
    return tuple(np.asarray(values_BT)[0, : len(ids)].tolist())


def _padded(lm: LanguageModel, ids: Sequence[int], adapter: str | None) -> tuple[Any, Any, Any]:
    """Return a text as programs take it: a row of a few lengths, the text's own, and its adapter's number."""
    if lm.programs.partitioner.mesh is not None:
        raise InvalidOption("texts are scored on one device: load the model without a mesh, or use logits")
    if not isinstance(lm.programs.layout, DenseLayout | PagedLayout):
        raise InvalidOption("texts are scored as all tokens see them: load the model with the dense cache")
    checked = check_ids(ids, lm.config.vocab_size)
    if len(checked) > lm.max_len:
        raise InvalidOption(f"the text has {len(checked)} tokens, but the context has room for {lm.max_len}")
    adapters_B = np.array(lm.loaded_adapters.numbers(adapter, 1), np.int32)
    return *pad_texts([checked], lm.programs.decoder.backend), adapters_B
