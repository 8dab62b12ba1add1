"""Hidden states of a model over texts, computed once and kept in memory-mapped files.

Heads on a frozen model need only these, its embeddings and its output matrix, so a CPU can train them at the speed of
the heads. For heads, the files hold the final states from the last token before an answer on. For streams, they hold
the states of all tokens before the streams' layers, because these layers attend to all. For drafters that read
features, they hold those of several layers of all tokens, side by side. The states are float16, one text after another,
in ``hidden.npy``. ``tokens.npy``, ``positions.npy`` and ``texts.npy`` hold each state's token,
position and text, and ``cache.json`` describes the model and the texts.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import WriteFailed
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params
from train.features.filling import FACTS, Filling, read_facts
from train.features.text_pass import Texts, run_before
from train.loop.whole_text import text_hidden
from train.texts.packing import Example

_ROW_GRID = 64
_TOKENS_AT_ONCE = 4096


class HiddenStates(NamedTuple):
    """States of P tokens, memory-mapped; ``texts`` numbers each one's text from 0.

    Those of several layers stand side by side. ``predicted`` marks the tokens of answers; of a conversation, other
    turns are kept too.
    """

    hidden_PD: np.ndarray
    tokens_P: np.ndarray
    positions_P: np.ndarray
    texts_P: np.ndarray
    predicted_P: np.ndarray

    @property
    def num_texts(self) -> int:
        """The number of texts."""
        return int(self.texts_P[-1]) + 1

    def select(self, texts: np.ndarray) -> "HiddenStates":
        """Return the states of some texts, in memory."""
        chosen_P = np.isin(self.texts_P, texts)
        return HiddenStates(*(np.asarray(array[chosen_P]) for array in self))

    def without(self, texts: np.ndarray) -> "HiddenStates":
        """Return the same mapped states, with text -1 (no text) for those of ``texts``."""
        return self._replace(texts_P=np.where(np.isin(self.texts_P, texts), -1, self.texts_P).astype(np.int32))


def cache_hidden_states(
    lm: LanguageModel,
    examples: Sequence[Example],
    folder: Path,
    report: Callable[[int, str], None] = lambda done, said: None,
    num_top: int = 0,
    layers: tuple[int, ...] = (),
) -> HiddenStates:
    """Return the states of texts from ``folder``; compute those that it lacks.

    With ``num_top`` they are the states of whole texts before the last ``num_top`` layers, with ``layers`` those before
    each of these, ascending (`jaxinfer.cache.features`). ``report`` gets the number of
    finished texts. An interrupted run keeps its states, and the next one continues. Raises InvalidCheckpoint if the
    folder is for another model, other texts or other layers.
    """
    facts = describe(lm, examples, num_top, layers)
    if not (folder / FACTS).is_file():
        try:
            _compute(lm, examples, folder, facts, report, num_top, layers)
        except OSError as error:
            raise WriteFailed(f"{folder}: {error.strerror or error}; free some space or give another --cache") from None
    read_facts(folder / FACTS, facts)
    predicted_P = np.concatenate([example.mask[_first(example, num_top, layers) :] for example in examples])
    hidden_PD, tokens_P, positions_P, texts_P = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _NAMES)
    return HiddenStates(hidden_PD, tokens_P, positions_P, texts_P, predicted_P)


def no_states(examples: Sequence[Example], width: int) -> HiddenStates:
    """Return zeros of this width in the place of the states of whole texts, which take no memory, for a dry run."""
    count = sum(len(example.tokens) for example in examples)
    zero_P = np.zeros(count, np.int32)
    zero_PD = np.broadcast_to(np.float16(0), (count, width))
    return HiddenStates(zero_PD, zero_P, zero_P, zero_P, np.ones(count, bool))


_NAMES = ("hidden", "tokens", "positions", "texts")


def describe(
    lm: LanguageModel, examples: Sequence[Example], num_top: int = 0, layers: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return everything that hidden states depend on."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(np.asarray([len(example.tokens), *example.tokens], np.int32).tobytes())
        digest.update(np.asarray(example.mask).tobytes())
    return {
        "base": fingerprint(lm.params),
        "dtype": lm.backend.param_dtype,
        "num_texts": len(examples),
        "texts": digest.hexdigest()[:16],
        **({"before_last": num_top} if num_top else {}),
        **({"before_layers": list(layers)} if layers else {}),
    }


def first_state(example: Example) -> int:
    """Return the first kept state of a text: at the token before the first predicted one."""
    return max(example.mask.index(True) - 1, 0)


def _first(example: Example, num_top: int, layers: tuple[int, ...]) -> int:
    return 0 if num_top or layers else first_state(example)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(
    decoder: Decoder, num_top: int, layers: tuple[int, ...], params: Params, tokens_BT: Int[Array, "B T"]
) -> Float[Array, "B T F"]:
    if not num_top and not layers:
        return text_hidden(decoder, params, tokens_BT)
    layers = layers or (decoder.config.num_layers - num_top,)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    return run_before(Model(decoder, params), Texts(tokens_BT, positions_BT, jnp.ones_like(tokens_BT)), layers)


def _compute(
    lm: LanguageModel,
    examples: Sequence[Example],
    folder: Path,
    facts: Mapping[str, Any],
    report: Callable[[int, str], None],
    num_top: int,
    layers: tuple[int, ...],
) -> None:
    firsts = [_first(example, num_top, layers) for example in examples]
    counts = np.array([len(example.tokens) - first for example, first in zip(examples, firsts)])
    starts = np.concatenate([[0], np.cumsum(counts)])
    total, width = int(starts[-1]), max(1, len(layers)) * lm.config.model_dim
    shapes = {"hidden": ((total, width), np.float16), **dict.fromkeys(_NAMES[1:], ((total,), np.int32))}
    # Texts of similar length run together. Rows are padded on the right, where no earlier token attends.
    order = np.argsort([len(example.tokens) for example in examples], kind="stable")
    with Filling(folder, facts, shapes) as filling:
        arrays, done = filling.arrays, filling.done
        while done < len(order) and not filling.is_whole:
            length = -(-len(examples[order[done]].tokens) // _ROW_GRID) * _ROW_GRID
            most = max(1, _TOKENS_AT_ONCE // length)
            rows = [at for at in order[done : done + most] if len(examples[at].tokens) <= length]
            tokens_BT = np.zeros((most, length), np.int32)
            for row, at in enumerate(rows):
                tokens_BT[row, : len(examples[at].tokens)] = examples[at].tokens
            hidden_BTF = np.asarray(_forward(lm.programs.decoder, num_top, layers, lm.params, tokens_BT))
            limit = np.finfo(np.float16).max
            for row, at in enumerate(rows):
                first, size = firsts[at], len(examples[at].tokens)
                place = np.s_[starts[at] : starts[at + 1]]
                arrays["hidden"][place] = np.clip(hidden_BTF[row, first:size].astype(np.float32), -limit, limit)
                arrays["tokens"][place] = examples[at].tokens[first:]
                arrays["positions"][place] = np.arange(first, size)
                arrays["texts"][place] = at
            done += len(rows)
            filling.advance(done)
            report(done, f"{int(counts[order[:done]].sum()):,} states")
        if not filling.is_whole:
            filling.finish()
