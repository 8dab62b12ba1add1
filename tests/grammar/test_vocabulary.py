"""What each token adds to a text, byte by byte, for every kind of tokenizer."""

import json

import pytest

from jaxinfer.grammar import Grammar
from jaxinfer.grammar.automaton import DEAD
from jaxinfer.grammar.tables import GrammarTables
from jaxinfer.grammar.vocabulary import token_bytes
from jaxinfer.sampling import SamplingParams
from jaxinfer.tokenizers import load_tokenizer
from tests.tokenizers.vocabularies import open_folder, train_sentence_piece
from tests.toys import write_byte_tokenizer

TEXTS = ("Hello, world", 'naïve {"a": 1}', "日本 😀!", " two  spaces\n\ttab")


@pytest.fixture(params=["sentence_piece", "byte_level"])
def tokenizer(request, tmp_path):
    if request.param == "byte_level":
        write_byte_tokenizer(tmp_path)
    else:
        (tmp_path / "tokenizer.model").write_bytes(train_sentence_piece(byte_fallback=True))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({}), encoding="utf-8")
    return load_tokenizer(open_folder(tmp_path))


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_join_to_the_text(tokenizer, text):
    before = tokenizer.encode("a", add_special_tokens=False)
    tokens = tokenizer.encode("a" + text, add_special_tokens=False)
    spellings = token_bytes(tokenizer)
    assert len(spellings) == tokenizer.vocab_size
    joined = b"".join(spellings[token] or b"" for token in tokens)
    assert joined.decode().lstrip() == tokenizer.decode([*before, *tokens])[1:].lstrip()


def test_special_tokens_may_not_come(tokenizer):
    spellings = token_bytes(tokenizer)
    assert spellings[tokenizer.bos_token_id] is None
    table = GrammarTables(lambda: tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size).table(
        Grammar.regex("(?s).*")
    )
    assert table.after([tokenizer.bos_token_id]) == DEAD
    assert table.after(tokenizer.encode("a日", add_special_tokens=False)) != DEAD


def test_what_was_compiled_is_kept(tokenizer):
    tables = GrammarTables(lambda: tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size)
    assert tables.table(Grammar.regex("a+")) is tables.table(Grammar.regex("a+"))
    one, other = (SamplingParams(grammar=tables.table(Grammar.regex(pattern))) for pattern in ("a+", "b+"))
    assert one == SamplingParams(grammar=tables.table(Grammar.regex("a+"))) != other
    assert len({one, other}) == 2
