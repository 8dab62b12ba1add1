"""``python -m train.numbers``: trains a tiny model, from nothing, to play a game of arithmetic; a minute on a CPU.

It is what `jaxinfer bench search` can tell searches apart with: it imitates players who find a good move only half the
time. It writes the folder ``OUT/model``, and the openings that `jaxinfer bench search` does not ask for to
``OUT/prompts.jsonl``, for rollouts.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxinfer.bench.search.numbers import MOST_TOKENS, game, opening, openings, vocabulary
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.decoder import Decoder
from jaxinfer.ops.backend import choose_backend
from train.command import EXIT_INTERRUPTED, number, run_command
from train.loop.fit import FitSettings, fit
from train.loop.step import Schedule, compile_step, initial_state, next_token_loss
from train.model.words import SPECIAL, words_tokenizer, write_toy
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
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="folder of the run; an interrupted run goes on"
    )
    parser.add_argument("--seed", metavar="N", type=number(int, 0), default=0, help="seed (default: %(default)s)")
    parser.add_argument(
        "--steps", metavar="N", type=number(int, 1), default=1500, help="steps in all (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts", metavar="N", type=number(int, 2), default=1000, help="openings to write (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Train and write the model and the openings."""
    words = words_tokenizer(vocabulary())
    tokenizer, pairs = Tokenizer.from_str(words), openings(held_out=False)
    decoder = Decoder(CONFIG, choose_backend("float32", scan_layers=True))
    optimizer = Schedule(options.steps, peak_rate=3e-3, decay="linear").build_optimizer()
    step = compile_step(partial(next_token_loss, decoder), optimizer)
    told = {"steps": options.steps, "seed": options.seed}
    settings = FitSettings(options.out, options.steps, save_every=200, identity=told)

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

    result = fit(step, initial_state(decoder, optimizer, options.seed), None, batch_at, settings)
    if result.interrupted:
        print(f"saved at step {result.steps}; the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED
    folder = options.out / "model"
    write_toy(folder, CONFIG, result.params, words)
    chosen = np.random.default_rng(options.seed).permutation(len(pairs))[: options.prompts]
    lines = (json.dumps({"prompt": opening(*pairs[which])}) + "\n" for which in chosen)
    (options.out / "prompts.jsonl").write_text("".join(lines))
    print(f"{folder}: use it with jaxinfer bench search --tasks numbers --model {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("numbers", "Train a tiny model that plays a game of arithmetic.", add_arguments, run))
