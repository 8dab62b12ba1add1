"""SentencePiece ``.model`` files, with special tokens and spaces handled as in transformers' LlamaTokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import WordLevel

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.folder_settings import FolderSettings
from jaxinfer.tokenizers.tokenizer import check_text

_SPACE = "▁"
# Protocol buffers merge a message that occurs twice, so these bytes at the end of a model mean:
# normalizer_spec (field 3, two bytes long) { add_dummy_prefix (field 3): false }.
_NO_DUMMY_PREFIX = bytes([0x1A, 2, 0x18, 0])


class SentencePieceTokenizer:
    """A SentencePiece model and added tokens, which are split off before the model sees the text.

    ``source`` names the model in errors. ``always_adds_space`` adds a word's leading space even before a space, as
    SentencePiece does and LlamaTokenizer does not.
    """

    def __init__(self, model: bytes, settings: FolderSettings, *, source: str, always_adds_space: bool = False):
        self._settings = settings
        self._always_adds_space = always_adds_space
        self._model, pieces = _load(model, source)
        self._bare_model, _ = _load(model + _NO_DUMMY_PREFIX, source)
        ids = list(range(len(pieces)))
        kinds = zip(ids, self._model.is_control(ids), self._model.is_unknown(ids), strict=True)
        special_ids = {token for token, is_control, is_unknown in kinds if is_control or is_unknown}
        named_tokens = (*settings.special_tokens.values(), *settings.extra_special_tokens)
        named_ids = [(self._model.piece_to_id(content), content) for content in named_tokens]
        special_ids |= {token for token, content in named_ids if token >= 0 and pieces[token] == content}
        added = {token: AddedToken(pieces[token], special=True, normalized=False) for token in special_ids}
        added |= settings.added_tokens
        self._special_ids = {token for token, shape in added.items() if shape.special}
        self._pieces = dict(enumerate(pieces)) | {token: shape.content for token, shape in added.items()}
        self._added_ids = {shape.content: token for token, shape in added.items()}
        self._splitter = Tokenizer(WordLevel({"": 0}, unk_token=""))  # text between added tokens becomes one ""
        self._splitter.add_tokens(list(added.values()))
        self._id_of_cut = {self._splitter.token_to_id(content): token for content, token in self._added_ids.items()}

        adds_prefix = self._model.normalize("a").startswith(_SPACE)
        self._add_prefix_space = adds_prefix and settings.add_prefix_space is not False
        self._trims = self._model.normalize("a  a") == self._model.normalize("a a")
        byte_flags = self._model.is_byte(ids)
        self.byte_fallback_ids = frozenset(token for token in ids if byte_flags[token])
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        self._decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * self._add_prefix_space)

        self.vocab_size = max(self._pieces, default=-1) + 1
        named = {role: settings.find_id(role, self._find_id) for role in ("bos_token", "eos_token")}
        own_bos, own_eos = self._model.bos_id(), self._model.eos_id()
        if not settings.names_bos and own_bos >= 0:
            self.bos_token_id: int | None = own_bos
        else:
            self.bos_token_id = settings.choose_bos(named["bos_token"])
        eos = named["eos_token"] if named["eos_token"] is not None or own_eos < 0 else own_eos
        self.eos_token_ids = settings.choose_eos(eos)
        self.chat_template = settings.make_chat_template()
        self._before = [self.bos_token_id] if settings.add_bos is not False and self.bos_token_id is not None else []
        self._after = [eos] if settings.add_eos and eos is not None else []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the same ids as LlamaTokenizer, with the beginning-of-text token unless the folder disables it."""
        check_text(text)
        ids: list[int] = []
        encoding = self._splitter.encode(text)
        for cut, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if cut in self._id_of_cut:
                ids.append(self._id_of_cut[cut])
            else:
                ids += self._encode_segment(text[start:end], is_first=start == 0)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids; ids outside the vocabulary are skipped."""
        skipped = self._special_ids if skip_special_tokens else ()
        known = [self._pieces[int(token)] for token in ids if int(token) in self._pieces and int(token) not in skipped]
        return self._decoder.decode(known)

    def token(self, token_id: int) -> str | None:
        """Return a token as written in the vocabulary."""
        return self._pieces.get(token_id)

    def _encode_segment(self, text: str, is_first: bool) -> list[int]:
        """Encode text between added tokens; only the first segment, or with ``legacy`` every segment, begins a word."""
        begins_word = self._add_prefix_space and (is_first or self._settings.legacy)
        # LlamaTokenizer adds no second space before an existing one.
        doubles = self._trims or self._always_adds_space
        if begins_word and (doubles or not text.startswith((" ", _SPACE))):
            return self._model.encode(text)
        return self._bare_model.encode(text)

    def _find_id(self, content: str) -> int | None:
        if content in self._added_ids:
            return self._added_ids[content]
        found = self._model.piece_to_id(content)
        return found if self._pieces.get(found) == content else None


def read_sentence_piece(path: Path, settings: FolderSettings) -> SentencePieceTokenizer:
    """Build a folder's tokenizer from its ``tokenizer.model``."""
    return SentencePieceTokenizer(path.read_bytes(), settings, source=str(path))


def _load(model: bytes, source: str) -> tuple[Any, list[str]]:
    """Return the processor and its pieces by id."""
    # Imported here: most tokenizers are of another kind.
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
        return processor, processor.id_to_piece(list(range(processor.vocab_size())))
    except (RuntimeError, ValueError) as error:  # a piece that is not UTF-8 is a ValueError
        raise InvalidTokenizer(
            f"{source} is not a SentencePiece model: fetch it again, or give a tokenizer.json"
        ) from error
