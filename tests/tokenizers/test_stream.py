"""Incremental decoding equals decoding at once, in pieces that are never half a character."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.tokenizers import TextStream, load_tokenizer
from tests.tokenizers.vocabularies import (
    draw_ids,
    make_byte_fallback,
    open_folder,
    train_byte_level,
    train_sentence_piece,
)

KINDS = ["byte_level", "byte_fallback", "sentence_piece"]
LONG_TEXT = "hello 😀 👩‍👩‍👧 世界 there\n  return a + b é " * 40


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    built = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "sentence_piece":
            (folder / "tokenizer.model").write_bytes(train_sentence_piece())
        else:
            pipeline = train_byte_level() if kind == "byte_level" else make_byte_fallback()
            (folder / "tokenizer.json").write_text(pipeline.to_str(), encoding="utf-8")
        built[kind] = load_tokenizer(open_folder(folder))
    return built


def push_in_chunks(stream, ids, seed):
    """Push ids in chunks of random sizes, then finish; return the pieces."""
    draw = random.Random(seed)
    pieces, start = [], 0
    while start < len(ids):
        size = draw.choice([1, 1, 2, 3, 7])
        pieces.append(stream.push(ids[start : start + size]))
        start += size
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.sampled_from([0, 1, 5, 40, 200]),
    prompt_length=st.sampled_from([0, 1, 3, 60]),
    only_bytes=st.booleans(),
)
def test_any_ids_give_the_text_of_decoding_at_once(tokenizers, kind, seed, length, prompt_length, only_bytes):
    """Uniform ids make broken characters, which is where windows and runs of byte tokens go wrong."""
    tokenizer = tokenizers[kind]
    prompt = draw_ids(seed + 1, tokenizer.vocab_size, prompt_length)
    # A run of byte tokens over the border would change the prompt's own text.
    prompt = [*prompt, *tokenizer.encode("ab", add_special_tokens=False)] if prompt else []
    size = min(tokenizer.vocab_size, 259 if only_bytes else tokenizer.vocab_size)
    ids = draw_ids(seed, size, length)
    stream = TextStream(tokenizer, prompt)
    pieces = push_in_chunks(stream, ids, seed)
    assert "".join(pieces) == stream.text == tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_holds_half_a_character(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = f"{LONG_TEXT}ab 🦕 cd"  # of a character that takes several tokens
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 400
    assert kind != "byte_level" or any("\ufffd" in tokenizer.decode([token]) for token in ids)
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text
    assert sum(bool(piece) for piece in pieces) > len(ids) // 10


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfinished_character_comes_at_the_end(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("ab 🦕", add_special_tokens=False)[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(ids).rstrip() == "ab"
    assert set(stream.finish().strip()) == {"\ufffd"}
    assert stream.finish() == ""
    assert stream.text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_a_prompt_keeps_its_leading_space(tokenizers, kind):
    """A prompt that ends with a special token has no text of its own in the window's last tokens."""
    tokenizer = tokenizers[kind]
    first = tokenizer.encode("ab", add_special_tokens=False)
    second = tokenizer.encode("ab ab", add_special_tokens=False)[len(first) :]
    stream = TextStream(tokenizer, [*first, *[2] * 40])
    assert stream.push(second) == " ab"
    stream.push([2] * 40)
    assert stream.push(second) == " ab"


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_begun_by_the_prompt_is_completed(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("ab 🦕", add_special_tokens=False)
    stream = TextStream(tokenizer, ids[:-2])
    assert stream.push(ids[-2:]) + stream.finish() == "🦕"
    broken = TextStream(tokenizer, ids[:-2])
    assert broken.finish() == ""


class CountedDecoding:
    """A tokenizer that notes how many ids each decoding took."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.sizes: list[int] = []
        self.vocab_size = tokenizer.vocab_size
        self.bos_token_id, self.eos_token_ids = tokenizer.bos_token_id, tokenizer.eos_token_ids
        self.chat_template = tokenizer.chat_template
        self.byte_fallback_ids = tokenizer.byte_fallback_ids

    def encode(self, text, *, add_special_tokens=True):
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids, *, skip_special_tokens=True):
        self.sizes.append(len(ids))
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_output_costs_no_more_a_token_than_a_short_one(tokenizers, kind):
    counted = CountedDecoding(tokenizers[kind])
    ids = counted.encode(LONG_TEXT, add_special_tokens=False)
    stream = TextStream(counted, ids)
    for token in ids:
        stream.push([token])
    assert max(counted.sizes) <= 80
    assert sum(counted.sizes) <= 60 * len(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    stop=st.lists(st.sampled_from(["\n", "世界", "界 th", "😀 👩", "n a", "re"]), max_size=3),
)
def test_stop_strings_cut_text_and_tokens_whatever_the_chunks(tokenizers, kind, seed, stop):
    tokenizer = tokenizers[kind]
    text = "hello world 世界 there\n  return a + b 😀 👩‍👩‍👧 é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stop=stop)
    pieces = push_in_chunks(stream, ids, seed)
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    if not ends:
        assert (stream.stopped, stream.stop_token_index, stream.text) == (False, None, text)
        return
    end, start = min(ends)
    assert stream.stopped
    assert "".join(pieces) == stream.text == text[:start]
    index = stream.stop_token_index
    assert index is not None
    assert tokenizer.decode(ids[: index + 1]).startswith(text[:end])
    assert not tokenizer.decode(ids[:index]).startswith(text[:end])


def test_nothing_is_taken_after_a_stop(tokenizers):
    tokenizer = tokenizers["byte_level"]
    stream = TextStream(tokenizer, stop=["b"])
    assert stream.push(tokenizer.encode("a b c")) == "a "
    assert (stream.push(tokenizer.encode("more")), stream.finish(), stream.text) == ("", "", "a ")


def test_the_beginning_of_a_stop_string_is_held_and_given_back(tokenizers):
    tokenizer = tokenizers["byte_level"]
    stream = TextStream(tokenizer, stop=["###"])
    assert stream.push(tokenizer.encode("x##")) == "x"
    assert stream.push(tokenizer.encode("y##")) == "##y"
    assert (stream.finish(), stream.stopped) == ("##", False)


def test_a_prompt_is_no_part_of_a_stop_string(tokenizers):
    tokenizer = tokenizers["byte_level"]
    stream = TextStream(tokenizer, tokenizer.encode("x#"), stop=["##"])
    assert stream.push(tokenizer.encode("#y")) == "#y"
