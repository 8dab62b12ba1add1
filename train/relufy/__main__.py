"""``python -m train.relufy``: trains a model with ReLU in its feed-forward layers to say what it said without.

The student begins with the model's weights, and with ReLU where the model has another activation; it learns the
distribution that the model has (ReLU Strikes Back, 2310.04564, by distillation). Then most of its features are zero,
and `load(sparsity="exact")` does not read their weights. With ``--threshold`` features up to that activation are zero
too, in training as later. It writes the folder ``OUT/model``, with hidden units that are active together side by side.
"""

import argparse
import sys
from dataclasses import replace

import numpy as np

from jaxinfer.bench.sparsity.order import unit_orders
from jaxinfer.bench.sparsity.shares import active_features
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.models.unit_order import in_order, live_share
from jaxinfer.ops.sparsity import Sparsity
from train.arguments import load_base, refuse_few_bits
from train.command import number, run_command
from train.distill.own_teacher import (
    MODEL,
    Change,
    Trained,
    add_own_teacher_arguments,
    describe_changed,
    train_changed,
)
from train.model.folder import check_writable, write_card, write_model

# The tokens of a held-out row over which zeros are counted, and the other rows by which hidden units are put in order.
_COUNTED, _ORDERED = 128, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.relufy``."""
    parser.add_argument(
        "--threshold",
        metavar="T",
        type=number(float, 0),
        default=0.0,
        help="activations up to T are zero too, and the model is to be loaded with sparsity threshold:T (default: 0)",
    )
    add_own_teacher_arguments(parser, learning_rate=3e-4)


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves and write the model with ReLU."""
    teacher = load_base(options, scan_layers=True)
    refuse_few_bits(teacher.params, f"--model {options.model}")
    if teacher.config.experts is not None:
        raise InvalidOption(f"--model {options.model} has experts: relufy trains dense feed-forward layers")
    sparsity = Sparsity("threshold", options.threshold) if options.threshold else None
    change = Change(f"{options.model} with ReLU", replace(teacher.config, activation="relu"), sparsity)
    checkpoint = open_checkpoint(options.model)
    check_writable(change.config, checkpoint, teacher.tokenizer)
    trained = train_changed(options, teacher, change)
    if isinstance(trained, int):
        return trained
    export(options, teacher, checkpoint, change, trained)
    return 0


def export(
    options: argparse.Namespace, teacher: LanguageModel, checkpoint: Checkpoint, change: Change, trained: Trained
) -> None:
    """Write the best parameters with a card that has their share of zeros; an existing folder is replaced."""
    folder, before, after = options.out / MODEL, trained.before.divergence, trained.after.divergence
    use = "exact" if change.sparsity is None else change.sparsity.name
    about = [
        f"{options.model}, fingerprint `{trained.told['base']}`, with ReLU in its feed-forward layers, trained to say",
        f"what it said without. Load it with sparsity `{use}`.",
    ]

    def card(*zeros: str) -> str:
        against, command = "the model with its own activation", f"jaxinfer generate --model FOLDER --sparsity {use} ..."
        return describe_changed(change, trained, about, against, "ReLU put in", command, zeros)

    params, dtype = trained.result.params, teacher.backend.param_dtype
    write_model(folder, change.config, params, dtype, checkpoint, teacher.tokenizer, card())
    # Zeros are those of the model as it is loaded, in the dtype that it is written in.
    written = load(folder, sparsity=None if change.sparsity is None else use)
    text, *others = np.asarray(trained.rows.held_out.tokens_BT)[: 1 + _ORDERED, :_COUNTED].tolist()
    active = active_features(written, text)
    zeros = 1 - float(np.mean([active_TF.mean() for active_TF in active]))
    # Whoever reads the model finds its hidden units in the order in which a TPU has most to leave out.
    orders = unit_orders(written, others or [text])
    write_model(folder, change.config, in_order(params, orders), dtype, checkpoint, teacher.tokenizer, card())
    live = [live_share(active_TF) for active_TF in active]
    in_blocks = [live_share(active_TF[:, order]) for active_TF, order in zip(active, orders)]
    lines = (
        f"| features that are zero | | {100 * zeros:.1f}% |",
        f"| live blocks of 128 features a token, as trained and as written, in order | {100 * np.mean(live):.1f}% | "
        f"{100 * np.mean(in_blocks):.1f}% |",
    )
    write_card(folder, card(*lines))
    print(
        f"{folder}: {trained.result.best_step} steps, KL {before:.4f} at first and {after:.4f} trained, "
        f"{100 * zeros:.1f}% zeros; use it with --model {folder} --sparsity {use}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(run_command("relufy", "Train a model with ReLU.", add_arguments, run))
