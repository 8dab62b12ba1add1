"""A SentencePiece model in Gemma's manner: no leading space, many user-defined symbols, marks around turns."""

import json

import pytest
import sentencepiece

from jaxinfer.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers import texts
from tests.tokenizers.vocabularies import open_folder, train_sentence_piece

TURNS = ["<start_of_turn>", "<end_of_turn>"]
MARKS = ["<mask>", "[multimodal]", "<unused0>", *TURNS, "<table>", "</table>"]
# Longer runs of spaces and lines than any symbol are split by SentencePiece and transformers in different places.
SYMBOLS = [*MARKS, "\n", "\n\n", "\n\n\n", "\n\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "\t"]
END_OF_TURN = 8
SETTINGS = {
    "tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
    "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False, "spaces_between_special_tokens": False,
    "clean_up_tokenization_spaces": False, "sp_model_kwargs": {}, "additional_special_tokens": TURNS,
    "chat_template": "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
}  # fmt: skip
TEXTS = [
    *texts.TEXTS, *texts.SPECIAL_TEXTS,
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", " <start_of_turn> a", "<start_of_turn",
    "<table>x</table>", "<bos>a<eos>", "a<mask>b", "[multimodal]▁▁x", "<unused0> x", "\n\n\n\na",
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> bytes:
    return train_sentence_piece(
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        add_dummy_prefix=False,
        control_symbols=[],
        user_defined_symbols=SYMBOLS,
    )


@pytest.fixture
def load(model, tmp_path):
    def load_with(**changes) -> Tokenizer:
        (tmp_path / "tokenizer.model").write_bytes(model)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma"}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**SETTINGS, **changes}))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, END_OF_TURN]}))
        return load_tokenizer(open_folder(tmp_path))

    return load_with


def declared(model: bytes, special: set[str]) -> dict[str, dict]:
    """Declare every symbol as a token that is parsed whole, as the published folders do."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *SYMBOLS]
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    shapes = ({"content": name, "special": name in special, **flags} for name in names)
    return {str(processor.piece_to_id(shape["content"])): shape for shape in shapes}


def test_a_conversation_is_written_with_marks_that_are_single_tokens_and_end_a_turn(load):
    tokenizer = load()
    assert tokenizer.chat_template is not None
    text = tokenizer.chat_template.render([{"role": "user", "content": " hello "}])
    assert text == "<bos><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[:2] == [2, END_OF_TURN - 1]
    assert ids.count(END_OF_TURN) == 1
    assert tokenizer.eos_token_ids == (1, END_OF_TURN)
    assert tokenizer.decode(ids) == "user\nhello\nmodel\n"


def test_a_text_begins_with_bos_and_no_added_space(load):
    tokenizer = load()
    ids = tokenizer.encode("hello")
    assert ids[0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids[1:]) == "hello"


def test_plain_text_gets_the_ids_of_sentencepiece(load, model):
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    tokenizer = load()
    cuts = ("<unk>", "<bos>", "<eos>")
    for text in [text for text in TEXTS if not any(cut in text for cut in cuts)]:
        assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text), text


@pytest.mark.parity
@pytest.mark.parametrize("is_declared", [True, False])
def test_ids_and_text_are_those_of_gemma_tokenizer(load, model, tmp_path, is_declared):
    """With symbols declared as the published folders do, or with special ones listed alone."""
    transformers = pytest.importorskip("transformers")
    special = {"<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *TURNS}
    changes = (
        {"added_tokens_decoder": declared(model, special)} if is_declared else {"additional_special_tokens": MARKS}
    )
    ours = load(**changes)
    theirs = transformers.GemmaTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
