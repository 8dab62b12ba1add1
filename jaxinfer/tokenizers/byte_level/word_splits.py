"""How byte-level vocabularies split text into words before merging, by the names of ``tokenizer.ggml.pre``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class WordSplit:
    """How text is split into words before merging; ``pattern`` None means GPT-2's pattern."""

    pattern: str | None = None
    isolates_digits: bool = False
    composes: bool = False  # applies Unicode NFC first
    ignores_merges: bool = False  # a word that is a token is not split
    adds_bos: bool = False  # the default if the file does not say


_SYMBOLS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_GPT_2 = WordSplit()
_LLAMA_3 = WordSplit(
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _SYMBOLS_AND_SPACES,
    ignores_merges=True,
    adds_bos=True,
)
_QWEN_2 = WordSplit(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _SYMBOLS_AND_SPACES, composes=True)
# A word ends where lower case changes to upper case, and a slash may follow symbols.
_TEKKEN = WordSplit(
    "|".join(_LETTERS) + r"|\p{N}" + _SYMBOLS_AND_SPACES.replace(r"+[\r\n]*", r"+[\r\n/]*"),
    ignores_merges=True,
    adds_bos=True,
)
_GPT_4O = WordSplit(
    "|".join(f"{letters}{_CONTRACTIONS}?" for letters in _LETTERS)
    + r"|\p{N}{1,3}"
    + _SYMBOLS_AND_SPACES.replace(r"+[\r\n]*", r"+[\r\n/]*")
)

WORD_SPLITS: Mapping[str, WordSplit] = MappingProxyType(
    {
        "gpt-2": _GPT_2,
        "phi-2": _GPT_2,
        "smollm": WordSplit(isolates_digits=True),
        "llama3": _LLAMA_3,
        "llama-v3": _LLAMA_3,
        "llama-bpe": _LLAMA_3,
        "dbrx": replace(_LLAMA_3, ignores_merges=False, adds_bos=False),  # Phi-4's
        "smaug-bpe": replace(_LLAMA_3, ignores_merges=False, adds_bos=False),
        "tekken": _TEKKEN,
        "qwen2": _QWEN_2,
        "deepseek-r1-qwen": _QWEN_2,
        "gpt-4o": _GPT_4O,
    }
)
# These architectures have one vocabulary each, so files older than ``tokenizer.ggml.pre`` are unambiguous.
ARCHITECTURE_SPLITS: Mapping[str, str] = MappingProxyType({"gpt2": "gpt-2", "phi2": "phi-2"})
# The transformers classes that read a vocabulary and merges, and the model types that use them by default.
CLASS_SPLITS: Mapping[str, str] = MappingProxyType(
    {"GPT2Tokenizer": "gpt-2", "CodeGenTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
)
MODEL_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "GPT2Tokenizer",
        "opt": "GPT2Tokenizer",
        "phi": "CodeGenTokenizer",
        "qwen2": "Qwen2Tokenizer",
        "qwen3": "Qwen2Tokenizer",
    }
)
