"""Errors that a user can fix. The command line prints them as one line and exits with code 2."""

_LONGEST, _LEAST_END = 300, 90


class JaxinferError(Exception):
    """Base of every error that names a user's mistake and how to fix it: one line of at most 300 characters.

    Messages quote what files and users say, of any length and with any characters.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


def shown(value: object) -> str:
    """Return how a value is written in a message, cut short."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no number of more than 4,300 digits
        return f"a number of type {type(value).__name__} with thousands of digits"


def one_line(message: str) -> str:
    """Return a message in one line without control characters; of a long one, the beginning and the end."""
    line = " ".join(message[: 4 * _LONGEST].split()) if len(message) <= 4 * _LONGEST else message
    if len(message) > 4 * _LONGEST:
        line = " ".join(message[: 2 * _LONGEST].split()) + " " + " ".join(message[-2 * _LONGEST :].split())
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    if len(line) <= _LONGEST:
        return line
    return f"{line[: _LONGEST - _LEAST_END - 5]} ... {line[-_LEAST_END:]}"


class InvalidOption(JaxinferError, ValueError):
    """An option, a sampling parameter or a request has an invalid value."""


class UnsupportedModel(JaxinferError, ValueError):
    """A configuration needs a feature that the decoder does not implement."""


class InvalidCheckpoint(JaxinferError, ValueError):
    """A checkpoint's files are damaged, incomplete or contradict each other."""


class CheckpointNotFound(JaxinferError, FileNotFoundError):
    """No checkpoint exists at the given path or hub id."""


class InvalidTokenizer(JaxinferError, ValueError):
    """A tokenizer or chat template is missing, damaged or of an unknown kind."""


class WriteFailed(JaxinferError, OSError):
    """A file could not be written: the disk is full, or the folder is not writable."""


class DownloadFailed(JaxinferError, ConnectionError):
    """A file could not be fetched: the hub is unreachable, or a checksum does not match."""


class EngineError(JaxinferError, RuntimeError):
    """A request could not be served; the message says why."""


class EngineClosed(EngineError):
    """The engine is closed, or closes."""


class EngineBusy(EngineError):
    """Too many requests wait already: try again later."""


class RequestCancelled(EngineError):
    """The request was cancelled."""


class RequestTimedOut(EngineError):
    """The request took longer than its timeout."""
