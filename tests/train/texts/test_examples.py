"""What is read from files is what should be learned, and every mistake is told with its line."""

import json

import numpy as np
import pytest

from jaxinfer.errors import InvalidOption, JaxinferError, WriteFailed
from jaxinfer.tokenizers import load_tokenizer
from jaxinfer.tokenizers.chat_template import ChatTemplate
from tests.toys import BEGIN, END, encode_bytes, write_tiny_llama
from train.texts.examples import chat_example, read_examples
from train.texts.packing import Example, Order, pack
from train.texts.records import RecordWriter, read_records, read_written
from train.texts.rows import split_texts

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "no"},
]
# As in ChatML, each turn ends with the token that ends a text.
TURNS = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from jaxinfer.checkpoint.open import open_checkpoint

    tokenizer = load_tokenizer(open_checkpoint(write_tiny_llama(tmp_path_factory.mktemp("tiny"))))
    tokenizer.chat_template = ChatTemplate(TURNS)
    return tokenizer


def write_lines(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_only_the_assistants_words_and_the_token_that_ends_them_are_predicted(tokenizer):
    example = chat_example(TALK, tokenizer)
    text = "user:hi<|end|>\nassistant:yes<|end|>\nuser:bye<|end|>\nassistant:no<|end|>\n"
    assert list(example.tokens) == tokenizer.encode(text, add_special_tokens=False)
    predicted = [token for token, counts in zip(example.tokens, example.mask) if counts]
    assert predicted == [*encode_bytes("yes"), END, *encode_bytes("no"), END]


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = ChatTemplate("{{ messages | length }}" + TURNS)
    try:
        with pytest.raises(InvalidOption, match="changes earlier turns"):
            chat_example(TALK, tokenizer)
    finally:
        tokenizer.chat_template = ChatTemplate(TURNS)


def test_every_form_of_line_is_read(tokenizer, tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"text": "ab"},
        {"messages": TALK},
        {"prompt": "hi", "response": "yes"},
        {"prompt_tokens": [5, 6], "tokens": [7, 8, 9], "text": "left aside"},
    )
    text, talk, pair, answer = read_examples(path, tokenizer, 200)
    assert (list(text.tokens), set(text.mask)) == (tokenizer.encode("ab"), {True})
    assert talk == chat_example(TALK, tokenizer)
    assert pair == chat_example(TALK[:2], tokenizer)
    assert answer == Example((5, 6, 7, 8, 9), (False, False, True, True, True))
    (tmp_path / "b.txt").write_text("abcdefgh")
    ids = tokenizer.encode("abcdefgh")
    pieces = read_examples(tmp_path / "b.txt", tokenizer, 4)
    assert [token for piece in pieces for token in piece.tokens] == ids
    assert max(len(piece.tokens) for piece in pieces) == 4


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("\n", "line 2: an empty line"),
        ('{"text": \n', "line 2: not JSON"),
        ("[1]\n", "line 2: .* is no JSON object"),
        ({"text": " "}, "line 2: the text is empty"),
        ({"words": 1}, "line 2: needs 'text', 'messages', or 'prompt'"),
        ({"messages": []}, "line 2: messages must be a list"),
        ({"messages": TALK[:1]}, "line 2: the conversation has no answer"),
        ({"prompt": "hi", "response": ""}, "line 2: the assistant's text is empty"),
        ({"text": "x" * 100}, "line 2: the text has 100 tokens, but there is room for 50"),
        ({"prompt_tokens": [1], "tokens": []}, "line 2: .* lists of token ids"),
    ],
)
def test_mistakes_are_told_with_file_and_line(tokenizer, tmp_path, line, complaint):
    path = write_lines(tmp_path / "data.jsonl", {"text": "fine"}, line)
    with pytest.raises(JaxinferError, match=f"data.jsonl, {complaint}"):
        read_examples(path, tokenizer, 50)


def test_packing_keeps_every_text_whole_and_none_twice():
    rng = np.random.default_rng(0)
    examples = [
        Example(tuple(rng.integers(2, 99, size).tolist()), tuple((rng.random(size) < 0.5).tolist()))
        for size in rng.integers(1, 17, 60)
    ]
    batch = pack(examples, 16, seed=3)
    found = []
    for tokens_T, mask_T, segments_T in zip(*map(np.asarray, batch)):
        for segment in range(1, segments_T.max() + 1):
            (places,) = np.nonzero(segments_T == segment)
            assert places.tolist() == list(range(places[0], places[-1] + 1))
            found.append(Example(tuple(tokens_T[places].tolist()), tuple(mask_T[places].tolist())))
        assert not mask_T[segments_T == 0].any()
    assert sorted(found) == sorted(examples)
    assert float(np.mean(np.asarray(batch.segments_BT) > 0)) > 0.85  # a row a text would be half empty
    assert (np.asarray(pack(examples, 16, seed=3).tokens_BT) == batch.tokens_BT).all()
    assert (np.asarray(pack(examples, 16, seed=4).tokens_BT) != batch.tokens_BT).any()


def test_texts_are_trained_on_or_held_out_and_never_both():
    trained, apart = split_texts(20, 0.1, seed=3)
    assert len(apart) == 2
    assert sorted([*trained, *apart]) == list(range(20))
    with pytest.raises(InvalidOption, match="1 texts leave none to train on"):
        split_texts(1, 0.1, seed=3)


def test_an_order_visits_everything_once_an_epoch_and_is_a_function_of_the_step():
    order = Order(10, 4, seed=1)
    visited = np.concatenate([order.at(step) for step in range(5)])
    assert sorted(visited[:10]) == sorted(visited[10:]) == list(range(10))
    assert visited[:10].tolist() != visited[10:].tolist()
    assert Order(10, 4, seed=1).at(3).tolist() == visited[12:16].tolist()
    assert np.concatenate([Order(10, 4, seed=2).at(step) for step in range(5)]).tolist() != visited.tolist()


def test_a_half_line_is_dropped_and_what_was_written_stays(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"line": 1}\n{"line": 2, "te')
    assert [record["line"] for record in read_written(path)] == [1]
    with RecordWriter(path) as writer:
        writer.append([{"line": 2}, {"line": 3}])
    assert [record.fields["line"] for record in read_records(path)] == [1, 2, 3]


@pytest.mark.parametrize("text", ["a note without an end", '{"line": 1}\n# a note'])
def test_a_file_of_another_program_keeps_its_last_line(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(InvalidOption, match="ends with something that no such command has written"):
        RecordWriter(path)
    assert path.read_text() == text


def test_a_full_disk_leaves_what_was_written(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    real = __import__("os").pwrite

    def full(file, data, offset):
        real(file, data[:5], offset)
        raise OSError(28, "No space left on device")

    with RecordWriter(path) as writer:
        writer.append([{"line": 1}])
        monkeypatch.setattr("train.texts.records.os.pwrite", full)
        with pytest.raises(WriteFailed, match="No space left on device; what was written before is intact"):
            writer.append([{"line": 2}])
    assert path.read_text() == '{"line": 1}\n'


def test_begin_token_is_not_doubled(tokenizer, tmp_path):
    """Chat templates write their own special tokens."""
    tokens = chat_example(TALK, tokenizer).tokens
    assert tokens[0] != BEGIN
