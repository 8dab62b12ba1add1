"""The vocabulary beside a llama2.c checkpoint: ``tokenizer.bin``, or the SentencePiece model it was made from.

The file starts with an int32, the longest token's length, which only C needs. Then each id has a float32 score, an
int32 length and that many bytes of UTF-8, with plain spaces in place of SentencePiece's mark.
"""

import math
import struct
from mmap import mmap
from pathlib import Path

from jaxinfer.checkpoint.mapped_file import map_file
from jaxinfer.errors import InvalidCheckpoint, InvalidTokenizer
from jaxinfer.tokenizers.folder_settings import FolderSettings
from jaxinfer.tokenizers.sentence_piece.model import PieceKind, write_sentence_piece_model
from jaxinfer.tokenizers.sentence_piece.tokenizer import SentencePieceTokenizer

_LEADING = struct.Struct("<i")
_ENTRY = struct.Struct("<fi")
_NAMES = ("<unk>", "<s>", "</s>")
_FIRST_BYTE, _NUM_BYTES = 3, 256
_MARK = "▁"
_MODEL = "tokenizer.model"


def load_llama2c_tokenizer(checkpoint: Path, vocab_size: int) -> SentencePieceTokenizer:
    """Find and read a ``.bin`` checkpoint's tokenizer; raises InvalidTokenizer if none has the right size.

    ``tok512.bin`` is for a model with 512 tokens, so it comes before ``tokenizer.bin``, which is often Llama 2's.
    """
    folder = checkpoint.parent
    names = (f"tok{vocab_size}.bin", "tokenizer.bin", _MODEL)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise InvalidTokenizer(f"{checkpoint} has no tokenizer: put {names[0]}, {names[1]} or {_MODEL} beside it")
    model = _read_bytes(found) if found.name == _MODEL else _read_vocabulary(found, vocab_size)
    # run.c begins every text with <s> and a space, whatever comes first in the text.
    tokenizer = SentencePieceTokenizer(model, _plain_settings(folder), source=str(found), always_adds_space=True)
    if tokenizer.vocab_size != vocab_size:
        raise _refuse(found, f"it has {tokenizer.vocab_size} tokens, but the model's vocabulary has {vocab_size}")
    return tokenizer


def _read_vocabulary(path: Path, vocab_size: int) -> bytes:
    """Convert a ``tokenizer.bin`` back to the SentencePiece model that it was written from."""
    if vocab_size < _FIRST_BYTE + _NUM_BYTES:
        raise _refuse(path, f"a vocabulary of {vocab_size} has no room for {', '.join(_NAMES)} and {_NUM_BYTES} bytes")
    ids: dict[str, int] = {}
    scores = []
    data, at = _map(path), _LEADING.size
    for token in range(vocab_size):
        if at >= len(data):
            raise _refuse(path, f"it has {token} tokens, but the model's vocabulary has {vocab_size}")
        score, length, at = *_read_entry(path, data, at, token), at + _ENTRY.size
        piece = _read_piece(path, data[at : at + length], token)
        if ids.setdefault(piece, token) != token:
            raise _refuse(path, f"tokens {ids[piece]} and {token} are both {piece!r:.80}")
        scores.append(score)
        at += length
    if at != len(data):
        raise _refuse(path, f"it goes on after {vocab_size} tokens, which is all that the model's vocabulary has")
    kinds = [PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.CONTROL, *[PieceKind.BYTE] * _NUM_BYTES]
    kinds += [PieceKind.NORMAL] * (vocab_size - len(kinds))
    return write_sentence_piece_model(list(ids), scores, kinds)


def _read_entry(path: Path, data: mmap | bytes, at: int, token: int) -> tuple[float, int]:
    left = len(data) - at - _ENTRY.size
    score, length = _ENTRY.unpack_from(data, at) if left >= 0 else (0.0, -1)
    if not 0 < length <= left:
        raise _refuse(path, f"token {token} does not fit into the file's {len(data)} bytes")
    if not math.isfinite(score):
        raise _refuse(path, f"the score of token {token} is {score}")
    return score, length


def _read_piece(path: Path, stored: bytes, token: int) -> str:
    """Return a piece in SentencePiece's spelling; the id decides special tokens and bytes, as in run.c."""
    if token < _FIRST_BYTE:
        return _NAMES[token]
    try:
        piece = stored.decode()
    except UnicodeDecodeError:
        raise _refuse(path, f"token {token} is not UTF-8") from None
    byte = token - _FIRST_BYTE
    if byte >= _NUM_BYTES:
        return piece.replace(" ", _MARK)
    # The first exporters wrote the character with that number instead.
    if piece not in (f"<0x{byte:02X}>", chr(byte)):
        raise _refuse(path, f"token {token} is {piece!r:.80}, not the byte {byte}")
    return f"<0x{byte:02X}>"


def _map(path: Path) -> mmap | bytes:
    try:
        return map_file(path)
    except InvalidCheckpoint as error:
        raise InvalidTokenizer(str(error)) from None


def _read_bytes(path: Path) -> bytes:
    return bytes(_map(path))


def _refuse(path: Path, reason: str) -> InvalidTokenizer:
    return InvalidTokenizer(f"{path}: not this model's tokenizer, or damaged: {reason}; put the model's own beside it")


def _plain_settings(folder: Path) -> FolderSettings:
    """Return llama2.c's settings: the model's own special tokens, <s> before a text and nothing after it."""
    return FolderSettings(
        origin=folder,
        special_tokens={},
        added_tokens={},
        add_bos=True,
        add_eos=False,
        add_prefix_space=True,
        legacy=True,
        chat_templates={},
        bos_id=1,
        eos_ids=(),
        names_bos=False,
    )
