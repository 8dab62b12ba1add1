"""The end of what a model has answered so far, to draft later answers from: agents repeat themselves."""

import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.notation import Array, Int

# Stands before each answer, and where there is none.
NOTHING = -1
# The first line of a file: what it is, and of which vocabulary the ids are.
_FORM = "jaxinfer answers 1"


@dataclass(eq=False)
class PastAnswers:
    """The last ``size`` tokens of answers; any thread may add one.

    With a ``file`` they begin with what it holds, and it is written anew after each answer; what cannot be written is
    remembered all the same. Raises InvalidOption for a file that is something else, or of another vocabulary.
    """

    # What programs depend on; they get the tokens as an argument.
    size: int
    vocab_size: int
    file: InitVar[Path | None] = None

    def __post_init__(self, file: Path | None) -> None:
        self._file, self._lock = file, threading.Lock()
        self._tokens_N = np.full(self.size, NOTHING, np.int32)
        if file is not None:
            if not file.parent.is_dir():
                raise InvalidOption(f"suffix: {file.parent}: no such folder; create it first")
            if file.exists():
                self._append(self._read(file))

    @property
    def tokens_N(self) -> Int[np.ndarray, " N"]:
        """The tokens, the newest last; `NOTHING` before each answer."""
        return self._tokens_N

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer."""
        if not len(tokens):
            return
        with self._lock:
            self._append(np.array([NOTHING, *tokens], np.int32))
            if self._file is not None:
                with suppress(OSError):
                    self._write(self._file)

    def _append(self, tokens: np.ndarray) -> None:
        # A new array: programs may still read the old one.
        self._tokens_N = np.concatenate([self._tokens_N, tokens])[-self.size :]

    def _read(self, file: Path) -> np.ndarray:
        try:
            head, _, content = file.read_bytes().partition(b"\n")
        except OSError as error:
            raise InvalidOption(f"suffix: {file}: {error.strerror or error}") from None
        form, _, vocab_size = head.decode(errors="replace").rpartition(" ")
        if form != _FORM or len(content) % 4:
            raise InvalidOption(f"suffix: {file}: holds no answers; name another file")
        if vocab_size != str(self.vocab_size):
            raise InvalidOption(f"suffix: {file}: its answers are of {vocab_size} tokens, the model {self.vocab_size}")
        tokens = np.frombuffer(content, "<i4").astype(np.int32)
        if tokens.size and not (tokens.min() >= NOTHING and tokens.max() < self.vocab_size):
            raise InvalidOption(f"suffix: {file}: is damaged; remove it")
        return tokens

    def _write(self, file: Path) -> None:
        new = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            held = self._tokens_N[np.argmax(self._tokens_N >= 0) :] if (self._tokens_N >= 0).any() else ()
            new.write_bytes(f"{_FORM} {self.vocab_size}\n".encode() + np.asarray(held, "<i4").tobytes())
            os.replace(new, file)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise


def past_matches(
    past_N: Int[Array, " N"], tokens_BS: Int[Array, "B S"], lengths_B: Int[Array, " B"], most: int
) -> Int[Array, "B N"]:
    """Return how many tokens up to and with each place equal those at a text's end, counted up to ``most``.

    Places that nothing follows are no match.
    """
    alive_BN = jnp.broadcast_to(jnp.append(past_N[1:], NOTHING) >= 0, (tokens_BS.shape[0], past_N.shape[0]))
    count_BN = jnp.zeros(alive_BN.shape, jnp.int32)
    for back in range(most):
        last_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(lengths_B[:, None] - 1 - back, 0), axis=1)
        shifted_N = jnp.pad(past_N, (back, 0), constant_values=NOTHING)[: past_N.shape[0]]
        alive_BN = alive_BN & (shifted_N == last_B1) & (lengths_B[:, None] > back)
        count_BN = count_BN + alive_BN
    return count_BN


def past_continuations(past_N: Int[Array, " N"], places_BC: Int[Array, "B C"], count: int) -> Int[Array, "B C J"]:
    """Return the ``count`` tokens after each place, `NOTHING` from the answer's end on."""
    source_BCJ = places_BC[..., None] + 1 + jnp.arange(count)
    follow_BCJ = jnp.take(past_N, source_BCJ, mode="fill", fill_value=NOTHING)
    return jnp.where(jnp.cumprod(follow_BCJ >= 0, axis=-1, dtype=jnp.int32) > 0, follow_BCJ, NOTHING)
