"""``python -m train.needle``: trains a tiny model, from nothing, to find facts in long texts; minutes on a CPU.

It is what `jaxinfer bench needle` can tell caches apart with: two layers of attention that look a name up. A fact is
one token of its vocabulary, of whole words. It writes the folder ``OUT/model``.
"""

import argparse
import sys

from tokenizers import Tokenizer

from jaxinfer.bench.needle.haystack import vocabulary
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from train.command import EXIT_INTERRUPTED, run_command
from train.model.words import SPECIAL, add_toy_arguments, train_toy, words_tokenizer
from train.needle.texts import STAGES, needle_batch, stage_at

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=len(SPECIAL) + len(vocabulary()),
    num_layers=2,
    model_dim=64,
    ffn_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=16384,
    norm_eps=1e-5,
    # Slow rotations: what is looked up is a name, however far away.
    layer_pattern=(LayerKind(Rope(1e6, 16)),),
    bos_token_id=None,
    eos_token_ids=(0,),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.needle``."""
    add_toy_arguments(parser, sum(stage.steps for stage in STAGES))


def run(options: argparse.Namespace) -> int:
    """Train and write the model."""
    tokenizer = words_tokenizer(vocabulary())
    vocabulary_of_words = Tokenizer.from_str(tokenizer)

    def encode(text: str) -> list[int]:
        return vocabulary_of_words.encode(text).ids

    def batch_at(at: int) -> object:
        return needle_batch(stage_at(at, STAGES), encode, options.seed, at)

    folder = train_toy(options, CONFIG, tokenizer, batch_at, peak_rate=5e-3, save_every=100)
    if folder is None:
        return EXIT_INTERRUPTED
    print(f"{folder}: use it with jaxinfer bench needle --model {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("needle", "Train a tiny model that finds facts in long texts.", add_arguments, run))
