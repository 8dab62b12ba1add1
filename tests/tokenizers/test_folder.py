"""What the files of a Hugging Face folder decide."""

import json

import pytest
import tokenizers
from tokenizers import processors

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers import load_tokenizer
from tests.tokenizers.vocabularies import SPECIAL, open_folder, to_gguf_metadata, train_byte_level, train_sentence_piece


@pytest.fixture(scope="module")
def pipeline() -> tokenizers.Tokenizer:
    return train_byte_level()


@pytest.fixture
def folder(pipeline, tmp_path):
    (tmp_path / "tokenizer.json").write_text(pipeline.to_str(), encoding="utf-8")
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_ids_come_from_the_configuration_where_no_tokenizer_settings_are(folder):
    tokenizer = load_tokenizer(open_folder(folder, {"bos_token_id": 1, "eos_token_id": [2, 0]}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 0))
    assert tokenizer.chat_template is None


def test_generation_config_comes_before_config_and_the_end_of_text_is_joined(folder):
    write(folder, "generation_config.json", {"eos_token_id": [2, 300]})
    write(folder, "tokenizer_config.json", {"eos_token": {"content": SPECIAL[0]}, "bos_token": None})
    tokenizer = load_tokenizer(open_folder(folder, {"bos_token_id": 1, "eos_token_id": 17}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, (2, 300, 0))


def test_tokenizer_config_comes_before_special_tokens_map(folder):
    write(folder, "special_tokens_map.json", {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]})
    write(folder, "tokenizer_config.json", {"bos_token": SPECIAL[1]})
    tokenizer = load_tokenizer(open_folder(folder))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


def test_post_processor_of_the_file_decides_what_is_added(pipeline, folder):
    altered = tokenizers.Tokenizer.from_str(pipeline.to_str())
    altered.post_processor = processors.TemplateProcessing(single=[SPECIAL[1], "$A"], special_tokens=[(SPECIAL[1], 1)])
    write(folder, "tokenizer.json", altered.to_str())
    plain = pipeline.encode("hello").ids
    tokenizer = load_tokenizer(open_folder(folder))
    assert tokenizer.encode("hello") == [1, *plain]
    assert tokenizer.encode("hello", add_special_tokens=False) == plain


def test_explicit_flags_override_the_post_processor(pipeline, folder):
    settings = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "add_bos_token": True, "add_eos_token": True}
    write(folder, "tokenizer_config.json", settings)
    assert load_tokenizer(open_folder(folder)).encode("hello") == [1, *pipeline.encode("hello").ids, 2]


def test_tokens_that_only_the_configuration_declares_are_added(pipeline, folder):
    size = pipeline.get_vocab_size()
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {str(size): {"content": "<t>", "special": True}}})
    tokenizer = load_tokenizer(open_folder(folder))
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode("<t>") == [size]
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {str(size + 5): {"content": "<t>"}}})
    with pytest.raises(
        InvalidTokenizer, match=f"'<t>' the id {size + 5}, but tokenizer.json has room for it at {size}"
    ):
        load_tokenizer(open_folder(folder))


def render(folder, **variables):
    template = load_tokenizer(open_folder(folder)).chat_template
    assert template is not None
    return template.render([{"role": "user", "content": "x"}], **variables)


def test_template_file_wins_over_the_settings(folder):
    write(folder, "tokenizer_config.json", {"chat_template": "settings {{ eos_token }}", "eos_token": SPECIAL[2]})
    assert render(folder) == f"settings {SPECIAL[2]}"
    write(folder, "chat_template.jinja", "file")
    assert render(folder) == "file"


def test_named_templates_are_picked_by_use(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools|length }}"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert render(folder) == "plain"
    assert render(folder, tools=[{"name": "f"}]) == "with 1"


def test_folder_comes_before_the_vocabulary_of_a_gguf(pipeline, folder, tmp_path):
    checkpoint = open_folder(folder)
    both = type(checkpoint)("x", {}, checkpoint.tensors, folder, to_gguf_metadata(pipeline, eos_token_id=2))
    assert load_tokenizer(both).eos_token_ids == ()
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(both).eos_token_ids == (2,)


def test_tokenizer_json_comes_before_tokenizer_model(folder, pipeline):
    (folder / "tokenizer.model").write_bytes(train_sentence_piece())
    assert load_tokenizer(open_folder(folder)).vocab_size == pipeline.get_vocab_size()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged: EOF"),
        ("tokenizer.json", "[]", "tokenizer.json is damaged"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", [], "must hold a JSON object, not a list"),
        ("tokenizer_config.json", {"bos_token": "<nowhere>"}, "bos_token is '<nowhere>', which is not in the vocab"),
        ("tokenizer_config.json", {"eos_token": 7}, "eos_token must be a string"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token in tokenizer_config.json must be true or"),
        ("tokenizer_config.json", {"added_tokens_decoder": ["x"]}, "added_tokens_decoder must map ids to tokens"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template must be a string or a list of named"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id must be a token id or a list of them"),
    ],
)
def test_damaged_files_are_refused_by_name(folder, name, content, message):
    write(folder, name, content)
    with pytest.raises(InvalidTokenizer, match=message) as raised:
        load_tokenizer(open_folder(folder))
    assert "\n" not in str(raised.value)


def test_bytes_that_are_not_text_are_refused(folder):
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(InvalidTokenizer, match=name.split("_")[0].split(".")[0]):
            load_tokenizer(open_folder(folder))
        (folder / name).unlink()
        (folder / "tokenizer.json").exists() or write(folder, "tokenizer.json", train_byte_level().to_str())


def test_a_checkpoint_without_a_tokenizer_says_what_to_add(tmp_path):
    with pytest.raises(InvalidTokenizer, match=r"has no tokenizer: put the model's tokenizer\.json"):
        load_tokenizer(open_folder(tmp_path))


def with_parts(pipeline, **parts):
    return {**json.loads(pipeline.to_str()), **parts}


@pytest.mark.parametrize("charsmap", ["", "AAAA", "/////w==", "BAAAAAAAAAD/"])
def test_a_broken_map_of_characters_is_refused_and_the_library_does_not_panic(pipeline, folder, capfd, charsmap):
    parts = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}}
    write(folder, "tokenizer.json", with_parts(pipeline, **parts))
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json is damaged"):
        load_tokenizer(open_folder(folder))
    assert "panicked" not in capfd.readouterr().err


def test_a_panic_of_the_library_is_one_of_our_errors(pipeline, folder):
    """It strips more from the end of a token than the token has."""
    parts = {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 5}}
    write(folder, "tokenizer.json", with_parts(pipeline, **parts))
    tokenizer = load_tokenizer(open_folder(folder))
    with pytest.raises(InvalidTokenizer, match="the tokenizer is damaged: it cannot decode tokens"):
        tokenizer.decode(tokenizer.encode("a"))


@pytest.mark.parametrize("key", ["9" * 5000, "-1", "1.5", "\N{ARABIC-INDIC DIGIT ONE}"])
def test_a_declared_id_that_is_no_number_is_refused(folder, key):
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {key: {"content": "x"}}})
    with pytest.raises(InvalidTokenizer, match="added_tokens_decoder must map ids to tokens"):
        load_tokenizer(open_folder(folder))
