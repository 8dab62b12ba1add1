"""``python -m train.qat``: trains a model to say in few bits what it says in many.

The student computes with its weights rounded to ``--weights``, learns its unrounded self's distribution, and gets its
gradients straight through the rounding (quantization-aware training; LLM-QAT, 2305.17888). It writes the folder
``OUT/model``, which holds the very codes of the last forward pass.
"""

import argparse
import sys
from functools import partial

import jax

from jaxinfer.language_model import LanguageModel
from jaxinfer.models.few_bits import in_few_bits
from jaxinfer.ops.few_bits.formats import Format
from train.arguments import load_base, refuse_few_bits
from train.command import run_command
from train.distill.own_teacher import (
    MODEL,
    Change,
    Trained,
    add_own_teacher_arguments,
    describe_changed,
    train_changed,
)
from train.model.folder import write_card
from train.qat.rounding import check_widths, parse_form, rounded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.qat``."""
    parser.add_argument(
        "--weights", metavar="W", required=True, help="what to round to: int8, int4:group=64, nf4:group=64 or fp8"
    )
    add_own_teacher_arguments(parser, learning_rate=1e-4)


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves and write the model in few bits."""
    form = parse_form(options.weights)
    teacher = load_base(options, scan_layers=True)
    refuse_few_bits(teacher.params, f"--model {options.model}")
    check_widths(teacher.params, form, f"--weights {options.weights}")
    title = f"{options.model} in {options.weights}"
    change = Change(title, teacher.config, prepare=partial(rounded, form=form))
    trained = train_changed(options, teacher, change)
    if isinstance(trained, int):
        return trained
    export(options, teacher, form, change, trained)
    return 0


def export(options: argparse.Namespace, teacher: LanguageModel, form: Format, change: Change, trained: Trained) -> None:
    """Write the best parameters' codes with a card; an existing folder is replaced as a whole."""
    folder = options.out / MODEL
    about = [
        f"Weights in {options.weights}, trained to say what those of {options.model}, fingerprint",
        f"`{trained.told['base']}`, say in many bits. Drafters of that model fit this one too.",
    ]
    use = "jaxinfer generate --model FOLDER ..."
    card = describe_changed(change, trained, about, "the weights as they were", "rounded", use)
    params = in_few_bits(jax.device_get(trained.result.params), form, f"--weights {options.weights}")
    lm = teacher.changed(jax.device_put(params, jax.devices()[0]), is_rounded=True)
    lm.save(folder, overwrite=True)
    write_card(folder, card)
    print(
        f"{folder}: {trained.result.best_step} steps, KL {trained.before.divergence:.4f} rounded and "
        f"{trained.after.divergence:.4f} trained; use it with --model {folder}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(run_command("qat", "Train a model for few bits.", add_arguments, run))
