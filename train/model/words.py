"""Toys whose vocabulary is whole words: their tokenizer, their training, and the folder that they are written to."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.ops.backend import choose_backend
from train.command import number
from train.loop.fit import FitSettings, fit
from train.loop.step import Schedule, compile_step, initial_state, next_token_loss
from train.model.export import save_hf_folder

SPECIAL = ("<|end|>", "<|unknown|>")


def words_tokenizer(vocabulary: Sequence[str]) -> str:
    """Return a tokenizer of whole words, as ``tokenizer.json`` holds it."""
    words = {word: index for index, word in enumerate((*SPECIAL, *vocabulary))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": index, "content": name, **flags} for index, name in enumerate(SPECIAL)],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": SPECIAL[1]},
        }
    )


def add_toy_arguments(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the arguments of commands that train a toy: ``--out``, ``--seed`` and ``--steps``."""
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="folder of the run; an interrupted run goes on"
    )
    parser.add_argument("--seed", metavar="N", type=number(int, 0), default=0, help="seed (default: %(default)s)")
    parser.add_argument(
        "--steps", metavar="N", type=number(int, 1), default=steps, help="steps in all (default: %(default)s)"
    )


def train_toy(
    options: argparse.Namespace,
    config: DecoderConfig,
    tokenizer: str,
    batch_at: Callable[[int], Any],
    peak_rate: float,
    save_every: int,
) -> Path | None:
    """Train a model from nothing to predict batches, write it and return its folder; None after an interrupt.

    Its end of text is the first special token.
    """
    decoder = Decoder(config, choose_backend("float32", scan_layers=True))
    optimizer = Schedule(options.steps, peak_rate=peak_rate, decay="linear").build_optimizer()
    step = compile_step(partial(next_token_loss, decoder), optimizer)
    told = {"steps": options.steps, "seed": options.seed}
    settings = FitSettings(options.out, options.steps, save_every=save_every, identity=told)
    result = fit(step, initial_state(decoder, optimizer, options.seed), None, batch_at, settings)
    if result.interrupted:
        print(f"saved at step {result.steps}; the same command goes on from there", file=sys.stderr)
        return None
    folder = options.out / "model"
    save_hf_folder(folder, config, jax.device_get(result.params))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}))
    return folder
