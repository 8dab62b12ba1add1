"""``python -m train.relufy``: trains a model with ReLU in its feed-forward layers to say what it said without.

The student begins with the model's weights, and with ReLU where the model has another activation; it learns the
distribution that the model has (ReLU Strikes Back, 2310.04564, by distillation). Then most of its features are zero,
and `load(sparsity="exact")` does not read their weights. With ``--threshold`` features up to that activation are zero
too, in training as later. It writes the folder ``OUT/model``.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.sparsity.shares import active_features
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.models.decoder import Decoder
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.sparsity import Sparsity
from train.arguments import (
    add_data_arguments,
    add_hard_targets_argument,
    add_length_argument,
    add_remat_argument,
    add_run_arguments,
    add_step_arguments,
    build_schedule,
    check_batch,
    fit_settings,
    identity,
    load_base,
    read_data,
)
from train.command import EXIT_INTERRUPTED, number, run_command
from train.distill.divergences import forward_kl
from train.distill.evaluation import DraftEvaluation, DraftFigures
from train.distill.loss import DistillLoss
from train.distill.samples import DistillSource
from train.loop.estimate import estimate
from train.loop.fit import FitResult, claim_folder, fit_and_draw
from train.loop.operations import forward_operations
from train.loop.placement import build_mesh, place_base, place_batch, start_state
from train.loop.step import StepSettings, compile_step
from train.model.card import describe_model
from train.model.folder import check_writable, write_model
from train.texts.packing import Order, split_batch
from train.texts.rows import TextRows, pack_texts, row_length

MODEL = "model"
# The tokens of a held-out row over which zeros are counted.
_COUNTED = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.relufy``."""
    add_run_arguments(parser, "what is trained, and its own teacher")
    parser.add_argument(
        "--threshold",
        metavar="T",
        type=number(float, 0),
        default=0.0,
        help="activations up to T are zero too, and the model is to be loaded with sparsity threshold:T (default: 0)",
    )
    data = add_data_arguments(parser)
    add_length_argument(data)
    add_hard_targets_argument(data)
    steps = add_step_arguments(parser, items="rows", learning_rate=3e-4)
    add_remat_argument(steps)


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves and write the model with ReLU."""
    microbatch = check_batch(options)
    teacher = load_base(options, scan_layers=True)
    if teacher.config.experts is not None:
        raise InvalidOption(f"--model {options.model} has experts: relufy trains dense feed-forward layers")
    config = replace(teacher.config, activation="relu")
    checkpoint = open_checkpoint(options.model)
    check_writable(config, checkpoint, teacher.tokenizer)
    length = row_length(options, config.max_position)
    rows = pack_texts(read_data(options, teacher, length), length, options.held_out, options.seed)
    mesh = build_mesh(options.mesh, config, microbatch)
    told = {"base": teacher.fingerprint, **identity(options)}
    frozen = place_base(teacher.params, teacher.config, teacher.backend, mesh)
    sparsity = Sparsity("threshold", options.threshold) if options.threshold else None
    plain = replace(choose_backend("float32", scan_layers=True), sparsity=sparsity)
    backend = replace(
        choose_backend(options.compute_dtype or "float32", scan_layers=True),
        sparsity=sparsity,
        remat_layers=options.remat,
    )
    # Copied: a train step consumes its parameters, and the teacher is still needed.
    begun = place_base(jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), teacher.params), config, backend, mesh)
    order = Order(len(rows.trained.tokens_BT), options.batch_size, options.seed)
    schedule = build_schedule(options, order.steps_per_epoch)
    optimizer = schedule.build_optimizer()
    state = start_state(begun, optimizer, mesh)
    loss = DistillLoss(teacher.programs.decoder, Decoder(config, backend), forward_kl, hard=options.hard_targets)
    step = compile_step(loss, optimizer, StepSettings(options.microbatches, options.compute_dtype, options.seed))
    source = DistillSource(rows.trained, order, options.seed)

    def batch_at(at: int) -> Any:
        return place_batch(split_batch(source.batch_at(at, {}), options.microbatches), mesh)

    if options.dry_run:
        operations = 4 * forward_operations(config, options.batch_size * length, length)
        print(*estimate(step, state, frozen, batch_at(0), schedule.num_steps, operations), sep="\n")
        return 0
    evaluation = DraftEvaluation(teacher.programs.decoder, Decoder(config, plain), frozen, rows.held_out)
    claim_folder(options.out, told)  # before anything is computed
    before = evaluation.measure(state.params)
    result = fit_and_draw(
        f"{options.model} with ReLU",
        step,
        state,
        frozen,
        batch_at,
        fit_settings(options, schedule.num_steps, told),
        evaluation,
    )
    if result.interrupted:
        return EXIT_INTERRUPTED
    export(options, teacher, checkpoint, told, result, (before, evaluation.measure(result.params)), rows)
    return 0


def export(
    options: argparse.Namespace,
    teacher: LanguageModel,
    checkpoint: Checkpoint,
    told: dict[str, Any],
    result: FitResult,
    figures: tuple[DraftFigures, DraftFigures],
    rows: TextRows,
) -> None:
    """Write the best parameters with a card that has their share of zeros; an existing folder is replaced."""
    before, after = figures
    folder = options.out / MODEL
    use = f"threshold:{options.threshold:g}" if options.threshold else "exact"
    config = replace(teacher.config, activation="relu")

    def write(zeros: list[str]) -> None:
        about = [
            f"{options.model}, fingerprint `{told['base']}`, with ReLU in its feed-forward layers, trained to say what",
            f"it said without. Load it with sparsity `{use}`.",
        ]
        lines = [
            "Over the tokens of held-out answers, against the model with its own activation:",
            "",
            "| | ReLU put in | trained |",
            "|---|---|---|",
            f"| KL, nats | {before.divergence:.4f} | {after.divergence:.4f} |",
            f"| same best token | {100 * before.agreement:.1f}% | {100 * after.agreement:.1f}% |",
            *zeros,
        ]
        title, command = f"{options.model} with ReLU", f"jaxinfer generate --model FOLDER --sparsity {use} ..."
        card = describe_model(title, about, command, lines, told, result, rows.num_predicted)
        write_model(folder, config, result.params, teacher.backend.param_dtype, checkpoint, teacher.tokenizer, card)

    write([])
    written = load(folder, sparsity=use if options.threshold else None)
    text = np.asarray(rows.held_out.tokens_BT)[0, :_COUNTED].tolist()
    zeros = 1 - float(np.mean([active_TF.mean() for active_TF in active_features(written, text)]))
    write([f"| features that are zero | | {100 * zeros:.1f}% |"])
    print(
        f"{folder}: {result.best_step} steps, KL {before.divergence:.4f} at first and {after.divergence:.4f} trained, "
        f"{100 * zeros:.1f}% zeros; use it with --model {folder} --sparsity {use}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(run_command("relufy", "Train a model with ReLU.", add_arguments, run))
