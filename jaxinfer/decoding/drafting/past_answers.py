"""The end of what a model has answered so far, to draft later answers from: agents repeat themselves."""

import fcntl
import os
import secrets
import stat
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
# Answers are users' texts: a new file is for its owner alone.
_OWN = 0o600


@dataclass(eq=False)
class PastAnswers:
    """The last ``size`` tokens of answers; any thread may add one.

    With a ``file`` they begin with what it holds, and each answer is added to it, beside those that other processes
    have added since; it never becomes shorter. What cannot be written is remembered all the same. Raises InvalidOption
    for a file that is something else, or of another vocabulary.
    """

    # What programs depend on; they get the tokens as an argument.
    size: int
    vocab_size: int
    file: InitVar[Path | None] = None

    def __post_init__(self, file: Path | None) -> None:
        # A link stays one: what it names is replaced.
        self._file, self._lock = file and file.resolve(), threading.Lock()
        self._tokens_N = np.full(self.size, NOTHING, np.int32)
        self._unwritten = self._tokens_N[:0]
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
        answer = np.array([NOTHING, *tokens], np.int32)
        with self._lock:
            if self._file is None:
                self._append(answer)
                return
            self._unwritten = np.concatenate([self._unwritten[-self.size :], answer])
            try:
                held = self._add_to(self._file, self._unwritten)
            except (OSError, InvalidOption):  # no room, or the file has become something else, and stays that
                self._append(answer)
                return
            self._unwritten = self._unwritten[:0]
            self._append(np.append(np.full(self.size, NOTHING, np.int32), held))

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

    def _add_to(self, file: Path, answers: np.ndarray) -> np.ndarray:
        """Write what the file holds now and these answers; return that."""
        folder = os.open(file.parent, os.O_RDONLY)
        new = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            # Until the folder is closed.
            fcntl.flock(folder, fcntl.LOCK_EX)
            held, mode = answers[:0], _OWN
            if file.exists():
                held, mode = self._read(file), stat.S_IMODE(file.stat().st_mode)
            tokens = np.concatenate([held, answers])[-max(self.size, held.size) :]
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWN), "wb") as written:
                os.fchmod(written.fileno(), mode)
                written.write(f"{_FORM} {self.vocab_size}\n".encode() + tokens.astype("<i4").tobytes())
            os.replace(new, file)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise
        finally:
            os.close(folder)
        return tokens


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
