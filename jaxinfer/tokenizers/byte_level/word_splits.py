"""How byte-level vocabularies split text into words before merging, by the names of ``tokenizer.ggml.pre``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class WordSplit:
    """How text is split into words before merging; ``pattern`` None means GPT-2's pattern.

    What a pattern of ``before`` matches is a piece of its own, one pattern after the other; ``pattern`` then splits all
    pieces.
    """

    pattern: str | None = None
    before: tuple[str, ...] = ()
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

_DIGITS = WordSplit(isolates_digits=True)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_WITHOUT_END = replace(_LLAMA_3, ignores_merges=False, adds_bos=False)
_DEEPSEEK_3 = WordSplit(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
)
# Letters with a case, of Unicode as it was when the vocabulary was made.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿ"
    "ᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK = WordSplit(
    r"\p{N}",
    before=(
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN_AND_HANGUL,
    ),
)
_DEEPSEEK_CODER = WordSplit(r"\p{N}", before=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL))
_FALCON = WordSplit(
    r"[0-9]{3}",
    before=(
        r"[\p{P}$+<=>^~|`]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    ),
)

WORD_SPLITS: Mapping[str, WordSplit] = MappingProxyType(
    {
        "gpt-2": _GPT_2,
        "phi-2": _GPT_2,
        **dict.fromkeys(("mpt", "olmo", "jais", "exaone4"), _GPT_2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
        "llama3": _LLAMA_3,
        "llama-v3": _LLAMA_3,
        "llama-bpe": _LLAMA_3,
        **dict.fromkeys(("falcon3", "pixtral"), _LLAMA_3),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _WITHOUT_END),  # the first is Phi-4's, too
        "glm4": replace(_LLAMA_3, adds_bos=False),
        "tekken": _TEKKEN,
        "qwen2": _QWEN_2,
        "deepseek-r1-qwen": _QWEN_2,
        **dict.fromkeys(("stablelm2", "hunyuan", "megrez"), replace(_QWEN_2, composes=False)),
        **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT_4O),
        "deepseek-llm": _DEEPSEEK,
        "deepseek-coder": _DEEPSEEK_CODER,
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_3),
        "falcon": _FALCON,
        "bloom": WordSplit(" ?[^(\\s|.,!?…。，、।۔،)]+"),
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
