"""Finds the first operation of a forward pass whose bits depend on how a text is run."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.layouts import DENSE
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.tapped_forward import tapped_forward

# All results of a pass are kept: for a model of 135M parameters, 2 MB a token.
LONGEST_TEXT = 256


@dataclass(frozen=True)
class Variant:
    """A way to run a text: as row ``row`` of ``batch`` rows that hold other texts, over a cache with ``spare_slots``.

    The text is cut into passes before the tokens that ``cuts`` number. Each pass has so many ``siblings`` more: nodes
    of a tree that no token of the text descends from.
    """

    batch: int = 1
    row: int = 0
    cuts: tuple[int, ...] = ()
    siblings: int = 0
    spare_slots: int = 0

    def __str__(self) -> str:
        """Say how the text is run."""
        ways = [f"as row {self.row} of {self.batch}"] if self.batch > 1 else []
        ways += [f"cut after {' and '.join(str(cut) for cut in self.cuts)} tokens"] if self.cuts else []
        ways += [f"beside {self.siblings} nodes of a tree"] if self.siblings else []
        ways += [f"with {self.spare_slots} spare slots"] if self.spare_slots else []
        return ", ".join(ways) or "alone"


@dataclass(frozen=True)
class Difference:
    """The first operation of ``variant`` whose results for the text differ from those of the first variant.

    ``operation`` is its path, as in ``blocks.layer_3.attention.queries``. ``count`` of the ``total`` numbers differ, by
    at most ``largest``; ``token`` is the first token with such a number.
    """

    variant: Variant
    operation: str
    token: int
    count: int
    total: int
    largest: float

    @property
    def layer(self) -> int | None:
        """The operation's layer; None outside of all."""
        names = [name for name in self.operation.split(".") if name.startswith("layer_")]
        return int(names[0].removeprefix("layer_")) if names else None


def check_bisects(lm: LanguageModel) -> None:
    """Raise InvalidOption for a model whose operations cannot be looked at one by one, or whose cache forgets."""
    if lm.programs.partitioner.mesh is not None:
        raise InvalidOption("a model on a mesh cannot be bisected: run it on one device")
    if lm.programs.decoder.backend.scan_layers:
        raise InvalidOption("layers in a scan, as on TPUs and GPUs, cannot be bisected: run the model on a CPU")
    if lm.programs.layout != DENSE:
        raise InvalidOption("a model with a streaming cache cannot be bisected: use the dense cache")


def usual_variants(length: int) -> tuple[Variant, ...]:
    """Return a text alone in one pass, and what may not change its bits: neighbours, a cut, a tree, spare slots."""
    return (
        Variant(),
        Variant(batch=3, row=2),
        Variant(cuts=(length // 2,)),
        Variant(siblings=3),
        Variant(spare_slots=64),
    )


def bisect_texts(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> tuple[int, Difference] | None:
    """Return the first text with a difference between its `usual_variants`, by its index, and the difference.

    Texts are cut after `LONGEST_TEXT` tokens, and repeated up to the longest one's length: so all have one shape and
    are compiled once, and tokens do not depend on what comes after them.
    """
    check_bisects(lm)
    length = min(max(map(len, texts)), LONGEST_TEXT)
    for index, text in enumerate(texts):
        found = first_difference(lm, np.resize(text, length).tolist(), usual_variants(length))
        if found is not None:
            return index, found
    return None


def first_difference(lm: LanguageModel, tokens: Sequence[int], variants: Sequence[Variant]) -> Difference | None:
    """Run a text in each way; return where the first variant differs from the first one's results, None if none does.

    Results that are kept are also stored, so that a difference may vanish which only operations have that the compiler
    fuses.
    """
    reference = _run(lm, tokens, variants[0])
    for variant in variants[1:]:
        found = _run(lm, tokens, variant)
        for (operation, expected), (_, results) in zip(reference, found, strict=True):
            # Bits, because NaN differs from itself and the zeros do not differ.
            differs = expected.view(np.uint8) != results.view(np.uint8)
            differs = differs.reshape(*expected.shape, -1).any(axis=-1)
            if differs.any():
                gaps = np.abs(expected[differs].astype(np.float64) - results[differs])
                token = int(np.argmax(differs.reshape(len(tokens), -1).any(axis=1)))
                return Difference(variant, operation, token, int(differs.sum()), differs.size, float(gaps.max()))
    return None


def _run(lm: LanguageModel, tokens: Sequence[int], variant: Variant) -> list[tuple[str, np.ndarray]]:
    """Return the operations' results for a text ``[T, ...]``, in order."""
    config, extra = lm.config, variant.siblings
    length = len(tokens)
    # The other rows' tokens are the text's too, in other orders.
    others = np.stack([np.roll(tokens, variant.row - row) for row in range(variant.batch)])
    cache = lm.programs.create_cache(variant.batch, length + extra + variant.spare_slots, extra + 1)
    pieces, starts = [], (0, *variant.cuts, length)
    for start, stop in itertools.pairwise(starts):
        size = stop - start
        nodes = np.concatenate([others[:, start:stop], np.full((variant.batch, extra), config.num_tokens - 1)], axis=1)
        # Siblings descend from themselves alone, and stand where the first token does.
        ancestors = np.eye(size + extra, dtype=bool)
        ancestors[:size, :size] = np.tri(size, dtype=bool)
        positions = np.broadcast_to(start + ancestors.sum(axis=1) - 1, nodes.shape)
        taps, cache = lm.programs.run(
            ("tapped", variant),
            partial(_tapped, lm.programs.decoder),
            (),
            lm.params,
            cache,
            *(jnp.asarray(array, jnp.int32) for array in (nodes, positions)),
            jnp.asarray(ancestors[None]),
            jnp.full((variant.batch,), start, jnp.int32),
            jnp.full((variant.batch,), length, jnp.int32),
        )
        pieces.append({name: np.asarray(array)[variant.row, :size] for name, array in taps.items()})
    return [(name.partition(" ")[2], np.concatenate([piece[name] for piece in pieces])) for name in sorted(pieces[0])]


def _tapped(
    decoder: Decoder,
    params: Any,
    cache: Any,
    tokens_BT: Any,
    positions_BT: Any,
    ancestors_1TT: Any,
    start_B: Any,
    lengths_B: Any,
) -> tuple[dict[str, Any], Any]:
    """Run one pass; its operations' names begin with numbers, so that they sort in order."""
    placements = cache.place(start_B, ancestors_1TT)
    taps, cache = tapped_forward(decoder, params, tokens_BT, positions_BT, cache, placements, lengths_B)
    return {f"{index:06d} {name}": array for index, (name, array) in enumerate(taps)}, cache
