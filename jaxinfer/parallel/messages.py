"""Messages from one process of a run to others, in order, by JAX's own coordination service.

That service is there wherever several processes run together, so no other port has to be open, and whoever waits for a
message holds no device. A message takes about half a millisecond. Processes of a run trust each other, as they do in
JAX itself: messages are pickled.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import jax

# So many messages are kept until all receivers have said that they have them, and as many may come before they do.
_BLOCK = 256
# Of one value that the service keeps.
_MOST_BYTES = 1 << 20
_WAIT_MS = 24 * 3600 * 1000


class Sender:
    """Sends messages under a name that all processes know; ``receivers`` are the numbers of the others."""

    def __init__(self, name: str, receivers: Sequence[int]) -> None:
        self._service, self._name, self._receivers, self._count = _service(), name, receivers, 0

    def send(self, message: Any) -> None:
        """Send a message; return at once, unless the receivers are hundreds of messages behind."""
        content = pickle.dumps(message)
        block, place = divmod(self._count, _BLOCK)
        if place == 0 and block >= 2:
            self._forget(block - 2)
        key = f"{self._name}/{block}/{place}"
        parts = [content[start : start + _MOST_BYTES] for start in range(0, len(content), _MOST_BYTES)]
        for number, part in enumerate(parts[1:], 1):
            self._service.key_value_set_bytes(f"{key}/{number}", part)
        # Last, for it is what receivers wait for.
        self._service.key_value_set_bytes(f"{key}/0", len(parts).to_bytes(4, "big") + parts[0])
        self._count += 1

    def _forget(self, block: int) -> None:
        for process in self._receivers:
            self._service.blocking_key_value_get_bytes(_received(self._name, block, process), _WAIT_MS)
        self._service.key_value_delete(f"{self._name}/{block}/")


class Receiver:
    """Receives what the `Sender` of the same name sends."""

    def __init__(self, name: str) -> None:
        self._service, self._name, self._count = _service(), name, 0

    def receive(self, wait_seconds: float) -> Any:
        """Return the next message; raise TimeoutError if there is none for so long."""
        block, place = divmod(self._count, _BLOCK)
        key = f"{self._name}/{block}/{place}"
        try:
            first = self._service.blocking_key_value_get_bytes(f"{key}/0", int(wait_seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(f"no message came for {wait_seconds} s") from error
            raise
        parts = [first[4:]]
        for number in range(1, int.from_bytes(first[:4], "big")):
            parts.append(self._service.blocking_key_value_get_bytes(f"{key}/{number}", _WAIT_MS))
        self._count += 1
        if place == _BLOCK - 1:
            self._service.key_value_set_bytes(_received(self._name, block, jax.process_index()), b"")
        return pickle.loads(b"".join(parts))


def _received(name: str, block: int, process: int) -> str:
    """Return the key by which a receiver says that it has a block's messages; it goes with the block."""
    return f"{name}/{block}/received/{process}"


def _service() -> Any:
    # JAX has no public name for it; its own libraries for checkpoints use it so.
    from jax._src import distributed

    return distributed.global_state.client
