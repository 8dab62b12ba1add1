"""``python -m train.numbers``: trains a tiny model, from nothing, to play a game of arithmetic; minutes on a CPU.

It is what `jaxinfer bench search` can tell searches apart with: it imitates players who find a good move only half the
time. It writes the folder ``OUT/model``, and the openings that `jaxinfer bench search` does not ask for to
``OUT/prompts.jsonl``, for rollouts.
"""

import argparse
import json
import sys

import numpy as np
from tokenizers import Tokenizer

from jaxinfer.bench.search.numbers import MOST_TOKENS, game, opening, openings, vocabulary
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from train.command import EXIT_INTERRUPTED, number, run_command
from train.model.words import SPECIAL, add_toy_arguments, train_toy, words_tokenizer
from train.texts.batches import Batch

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=len(SPECIAL) + len(vocabulary()),
    num_layers=2,
    model_dim=64,
    ffn_dim=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    max_position=64,
    norm_eps=1e-5,
    layer_pattern=(LayerKind(Rope(1e4, 16)),),
    bos_token_id=None,
    eos_token_ids=(0,),
)
_ROWS, _SKILL = 128, 0.5
# An opening's words, the game's and the end of the text.
_LENGTH, _OPENING = 4 + MOST_TOKENS + 1, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.numbers``."""
    add_toy_arguments(parser, steps=1500)
    parser.add_argument(
        "--prompts", metavar="N", type=number(int, 2), default=1000, help="openings to write (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Train and write the model and the openings."""
    words = words_tokenizer(vocabulary())
    tokenizer, pairs = Tokenizer.from_str(words), openings(held_out=False)

    def batch_at(at: int) -> Batch:
        rng = np.random.default_rng((options.seed, at))
        tokens_BT = np.zeros((_ROWS, _LENGTH), np.int32)
        mask_BT = np.zeros((_ROWS, _LENGTH), bool)
        for row, which in enumerate(rng.integers(len(pairs), size=_ROWS)):
            start, target = pairs[int(which)]
            ids = tokenizer.encode(game(start, target, _SKILL, rng)).ids
            tokens_BT[row, : len(ids)] = ids
            # The end of the text too, which is the padding's token.
            mask_BT[row, _OPENING : len(ids) + 1] = True
        return Batch(tokens_BT[None], mask_BT[None])

    folder = train_toy(options, CONFIG, words, batch_at, peak_rate=3e-3, save_every=200)
    if folder is None:
        return EXIT_INTERRUPTED
    chosen = np.random.default_rng(options.seed).permutation(len(pairs))[: options.prompts]
    lines = (json.dumps({"prompt": opening(*pairs[which])}) + "\n" for which in chosen)
    (options.out / "prompts.jsonl").write_text("".join(lines))
    print(f"{folder}: use it with jaxinfer bench search --tasks numbers --model {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("numbers", "Train a tiny model that plays a game of arithmetic.", add_arguments, run))
