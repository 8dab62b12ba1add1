"""Refuses options and prompts that a model, its cache or its mesh does not allow."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxinfer.cache.layouts import DENSE, CacheLayout, CropLayout, PagedLayout, RetrievalLayout, StreamingLayout
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.errors import InvalidCheckpoint, InvalidOption, InvalidTokenizer, shown
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.streaming import check_layout, is_endless
from jaxinfer.parallel.partitioner import Partitioner
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tokenizers import Tokenizer, load_tokenizer

# Where two vocabularies differ, some of these texts fall into other ids.
_PROBES = ("The quick brown fox, 3.14159 (or 1,000,000)!", "naïve 東京 ελληνικά 🙂", "def f(x):\n    return x")


def check_max_len(config: DecoderConfig, max_len: int | None, layout: CacheLayout = DENSE) -> None:
    """Refuse a cache or a bound on the text's length that the model's positions do not allow."""
    check_layout(config, layout)
    if max_len is None:
        return
    check_whole("max_len", max_len)
    longest = None if is_endless(layout) else config.longest_text
    if max_len < 2 or (longest is not None and max_len > longest):
        raise InvalidOption(f"max_len {max_len} is not between 2 and the model's context of {longest or 'any length'}")
    if isinstance(layout, StreamingLayout) and layout.sinks + layout.window > max_len:
        raise InvalidOption(
            f"cache streaming: sinks={layout.sinks} and window={layout.window} are more than max_len={max_len} tokens: "
            "use the dense cache"
        )


def check_whole(name: str, value: Any, least: int | None = None) -> None:
    """Refuse what is not a whole number, or less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidOption(f"{name} {value!r} is not a whole number")
    if least is not None and value < least:
        raise InvalidOption(f"{name} {value} is not {least} or more")


def check_mesh(layout: CacheLayout, partitioner: Partitioner) -> None:
    """Refuse a cache that runs on one device where there are several."""
    for name, kind in (("paged", PagedLayout), ("retrieval", RetrievalLayout), ("crop", CropLayout)):
        if isinstance(layout, kind) and partitioner.mesh is not None:
            raise InvalidOption(
                f"cache {name} runs on one device: load the model with the dense cache, or without a mesh"
            )


def check_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return a prompt's token ids; refuse what is none of the vocabulary's, and a prompt of nothing."""
    if not isinstance(ids, Sequence | np.ndarray) or not all(isinstance(token, int | np.integer) for token in ids):
        raise InvalidOption(f"a prompt is a text or a sequence of token ids, not {ids!r:.80}")
    checked = [int(token) for token in ids]
    if not checked:
        raise InvalidOption("the prompt is empty: give at least one token")
    wrong = next((token for token in checked if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidOption(f"token id {shown(wrong)} is not in the vocabulary of {vocab_size}")
    return checked


def check_texts(texts: object, config: DecoderConfig) -> list[list[int]]:
    """Return whole texts' token ids; refuse none at all, and a text that is longer than the positions a model knows."""
    if not isinstance(texts, Iterable):
        raise InvalidOption(f"{texts!r} is not a list of sequences of token ids")
    rows = [check_ids(ids, config.vocab_size) for ids in texts]
    if not rows:
        raise InvalidOption("no text to compute logits of: give at least one sequence of token ids")
    longest, known = max(map(len, rows)), config.max_position
    if config.learned_positions is not None and longest > known:
        raise InvalidOption(f"a text has {longest} tokens, but the model knows {known} positions: shorten it")
    return rows


def check_grammar(params: SamplingParams, strategy: Strategy) -> None:
    """Raise InvalidOption for a grammar with a strategy that searches instead of drawing."""
    if params.grammar is not None and strategy.exactness == "beam":
        raise InvalidOption("beam search follows no grammar: choose another strategy")


def read_tokenizer(checkpoint: Checkpoint, config: DecoderConfig) -> Tokenizer:
    """Return a checkpoint's tokenizer; raise InvalidCheckpoint if it has text for ids that the model has no row for."""
    tokenizer = load_tokenizer(checkpoint)
    # Fewer ids than rows are usual: embeddings are padded. Special tokens without a row do no harm, as a prompt that
    # holds one is refused: Gemma 3 1B has such a mark of images, which it does not read.
    if any(tokenizer.decode([token]) for token in range(config.vocab_size, tokenizer.vocab_size)):
        raise InvalidCheckpoint(
            f"{checkpoint.origin}: the tokenizer has {tokenizer.vocab_size} ids, but the embedding only "
            f"{config.vocab_size} rows; take both from one model"
        )
    return tokenizer


def says_alike(one: Tokenizer | None, checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint's tokenizer gives the ids of another for texts of several kinds, or one is missing."""
    try:
        other = load_tokenizer(checkpoint)
    except InvalidTokenizer:
        return True
    return one is None or all(one.encode(text) == other.encode(text) for text in _PROBES)
