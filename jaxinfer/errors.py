"""Errors that a user can mend; the command line prints them as one line and exits with code 2."""


class JaxinferError(Exception):
    """Base of every error that names a user's mistake and its mend."""


class InvalidOption(JaxinferError, ValueError):
    """An option, a sampling parameter or a request has a value that cannot be used."""


class UnsupportedModel(JaxinferError, ValueError):
    """A configuration asks for something that the decoder does not implement."""


class InvalidCheckpoint(JaxinferError, ValueError):
    """A checkpoint's files are damaged, incomplete or contradict each other."""


class CheckpointNotFound(JaxinferError, FileNotFoundError):
    """No checkpoint stands at the given path or hub id."""


class InvalidTokenizer(JaxinferError, ValueError):
    """A tokenizer or chat template is missing, damaged or of an unknown kind."""


class WriteFailed(JaxinferError, OSError):
    """A file could not be written: the disk is full, or the place does not take it."""


class DownloadFailed(JaxinferError, ConnectionError):
    """A file could not be fetched: the hub is unreachable, or a checksum does not match."""
