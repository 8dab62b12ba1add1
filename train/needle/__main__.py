"""``python -m train.needle``: trains a tiny model, from nothing, to find facts in long texts; minutes on a CPU.

It is what `jaxinfer bench needle` can tell caches apart with: two layers of attention that look a name up. A fact is
one token of its vocabulary, of whole words. It writes the folder ``OUT/model``.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from jaxinfer.bench.needle.haystack import vocabulary
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.decoder import Decoder
from jaxinfer.ops.backend import choose_backend
from train.command import EXIT_INTERRUPTED, number, run_command
from train.loop.fit import FitSettings, fit
from train.loop.step import Schedule, compile_step, initial_state, next_token_loss
from train.model.words import SPECIAL, words_tokenizer, write_toy
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
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="folder of the run; an interrupted run goes on"
    )
    parser.add_argument("--seed", metavar="N", type=number(int, 0), default=0, help="seed (default: %(default)s)")
    steps = sum(stage.steps for stage in STAGES)
    parser.add_argument(
        "--steps", metavar="N", type=number(int, 1), default=steps, help="steps in all (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Train and write the model."""
    tokenizer = words_tokenizer(vocabulary())
    vocabulary_of_words = Tokenizer.from_str(tokenizer)

    def encode(text: str) -> list[int]:
        return vocabulary_of_words.encode(text).ids

    decoder = Decoder(CONFIG, choose_backend("float32", scan_layers=True))
    optimizer = Schedule(options.steps, peak_rate=5e-3, decay="linear").build_optimizer()
    step = compile_step(partial(next_token_loss, decoder), optimizer)
    told = {"steps": options.steps, "seed": options.seed}
    settings = FitSettings(options.out, options.steps, save_every=100, identity=told)

    def batch_at(at: int) -> object:
        return needle_batch(stage_at(at, STAGES), encode, options.seed, at)

    result = fit(step, initial_state(decoder, optimizer, options.seed), None, batch_at, settings)
    if result.interrupted:
        print(f"saved at step {result.steps}; the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED
    folder = options.out / "model"
    write_toy(folder, CONFIG, result.params, tokenizer)
    print(f"{folder}: use it with jaxinfer bench needle --model {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("needle", "Train a tiny model that finds facts in long texts.", add_arguments, run))
