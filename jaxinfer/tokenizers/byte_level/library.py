"""Builds a byte-level BPE from the tokens and merges of a GGUF file, or of a folder without a ``tokenizer.json``."""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxinfer.errors import InvalidTokenizer
from jaxinfer.tokenizers.byte_level.word_splits import WordSplit

Merges = Sequence[tuple[str, str]]


def build_pipeline(
    ids: Mapping[str, int], merges: Merges, split: WordSplit, *, source: str, add_prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Build a vocabulary's pipeline; raises InvalidTokenizer, starting with ``source``, if its parts do not match."""
    try:
        pipeline = tokenizers.Tokenizer(models.BPE(dict(ids), list(merges), ignore_merges=split.ignores_merges))
    except Exception as error:  # the library raises bare exceptions
        reason = " ".join(str(error).split())
        raise InvalidTokenizer(f"{source} do not fit the tokens: {reason:.200}; fetch the file again") from error
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.isolates_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.before]
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    uses_own = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=uses_own))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.composes:
        pipeline.normalizer = normalizers.NFC()
    pipeline.decoder = decoders.ByteLevel()
    return pipeline
