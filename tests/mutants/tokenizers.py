"""Faults of tokenizers, streams of text, stop strings and chat templates."""

from tests.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a character that is cut in a stream is shown broken",
        "jaxinfer/tokenizers/stream.py",
        "        length -= 1\n    return length",
        "        length -= 1\n    return len(text)",
        "tests/tokenizers/test_stream.py::test_no_piece_holds_half_a_character",
    ),
    Fault(
        "a run of byte tokens is not waited for",
        "jaxinfer/tokenizers/stream.py",
        '        if self._byte_ids and self._ends_in_byte_run():\n            return ""\n        piece',
        "        piece",
        "tests/tokenizers/test_stream.py",
    ),
    Fault(
        "a stop string may begin a character late",
        "jaxinfer/tokenizers/stop_strings.py",
        "min(len(text), len(stop) - 1)",
        "min(len(text), len(stop) - 2)",
        "tests/tokenizers/test_stop_strings.py",
    ),
    Fault(
        "the last of several stop strings wins",
        "jaxinfer/tokenizers/stop_strings.py",
        "end, start = min(found)",
        "end, start = max(found)",
        "tests/tokenizers/test_stop_strings.py",
    ),
    Fault(
        "text held over several pieces is lost",
        "jaxinfer/tokenizers/stop_strings.py",
        "self._held = held[len(held) - keep :]",
        "self._held = text[max(0, len(text) - keep) :]",
        "tests/tokenizers/test_stop_strings.py",
    ),
    Fault(
        "lines of a template leave their line ends",
        "jaxinfer/tokenizers/chat_template.py",
        "trim_blocks=True",
        "trim_blocks=False",
        "tests/tokenizers/test_chat_template.py::test_templates_have_the_features_of_transformers",
    ),
    Fault(
        "tools are written with the default template",
        "jaxinfer/tokenizers/chat_template.py",
        '"tool_use" in self.templates else "default"',
        '"tool_use" not in self.templates else "default"',
        "tests/tokenizers/test_folder.py::test_named_templates_are_picked_by_use",
    ),
    Fault(
        "every segment begins a word",
        "jaxinfer/tokenizers/sentence_piece/tokenizer.py",
        "(is_first or self._settings.legacy)",
        "(is_first or not self._settings.legacy)",
        "tests/tokenizers/test_sentence_piece.py::test_only_the_first_segment_begins_a_word_unless_legacy",
    ),
    Fault(
        "bytes are shown by name",
        "jaxinfer/tokenizers/sentence_piece/tokenizer.py",
        "decoders.ByteFallback(), ",
        "",
        "tests/tokenizers/test_sentence_piece.py",
    ),
    Fault(
        "a vocabulary of a GGUF file takes spaces away",
        "jaxinfer/tokenizers/sentence_piece/model.py",
        "_number(4, False)",
        "_number(4, True)",
        "tests/tokenizers/test_gguf_spm.py",
    ),
    Fault(
        "spaces inside llama2.c's pieces stay spaces",
        "jaxinfer/tokenizers/llama2c.py",
        'piece.replace(" ", _MARK)',
        "piece",
        "tests/tokenizers/test_llama2c.py",
    ),
    Fault(
        "Qwen 2's texts are not composed",
        "jaxinfer/tokenizers/byte_level/word_splits.py",
        "composes=True)",
        "composes=False)",
        "tests/tokenizers/test_vocab_and_merges.py",
    ),
    Fault(
        "a folder's flags leave the post-processor as it is",
        "jaxinfer/tokenizers/hugging_face.py",
        "if settings.add_bos is not None or settings.add_eos is not None:",
        "if settings.add_bos is None and settings.add_eos is None and False:",
        "tests/tokenizers/test_folder.py::test_explicit_flags_override_the_post_processor",
    ),
)
