"""``python -m train.qat``: trains a model to say in few bits what it says in many.

The student computes with its weights rounded to ``--weights``, learns its unrounded self's distribution, and gets its
gradients straight through the rounding (quantization-aware training; LLM-QAT, 2305.17888). It writes the folder
``OUT/model``, which holds the very codes of the last forward pass.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.errors import WriteFailed
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.few_bits import in_few_bits
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.few_bits.formats import Format
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
from train.command import EXIT_INTERRUPTED, run_command
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
from train.model.folder import CARD
from train.qat.evaluation import RoundedEvaluation
from train.qat.loss import RoundedLoss
from train.qat.rounding import check_widths, parse_form
from train.texts.packing import Order, split_batch
from train.texts.rows import TextRows, pack_texts, row_length

MODEL = "model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.qat``."""
    add_run_arguments(parser, "what is trained, and its own teacher")
    parser.add_argument(
        "--weights", metavar="W", required=True, help="what to round to: int8, int4:group=64, nf4:group=64 or fp8"
    )
    data = add_data_arguments(parser)
    add_length_argument(data)
    add_hard_targets_argument(data)
    steps = add_step_arguments(parser, items="rows", learning_rate=1e-4)
    add_remat_argument(steps)


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves and write the model in few bits."""
    microbatch, form = check_batch(options), parse_form(options.weights)
    teacher = load_base(options, scan_layers=True)
    config = teacher.config
    check_widths(teacher.params, form, f"--weights {options.weights}")
    length = row_length(options, config.max_position)
    rows = pack_texts(read_data(options, teacher, length), length, options.held_out, options.seed)
    mesh = build_mesh(options.mesh, config, microbatch)
    told = {"base": teacher.fingerprint, **identity(options)}
    frozen = place_base(teacher.params, config, teacher.backend, mesh)
    backend = replace(choose_backend(options.compute_dtype or "float32", scan_layers=True), remat_layers=options.remat)
    # Copied: a train step consumes its parameters, and the teacher is still needed.
    begun = place_base(jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), teacher.params), config, backend, mesh)
    order = Order(len(rows.trained.tokens_BT), options.batch_size, options.seed)
    schedule = build_schedule(options, order.steps_per_epoch)
    optimizer = schedule.build_optimizer()
    state = start_state(begun, optimizer, mesh)
    distill = DistillLoss(teacher.programs.decoder, Decoder(config, backend), forward_kl, hard=options.hard_targets)
    settings = StepSettings(options.microbatches, options.compute_dtype, options.seed)
    step = compile_step(RoundedLoss(distill, form), optimizer, settings)
    source = DistillSource(rows.trained, order, options.seed)

    def batch_at(at: int) -> Any:
        return place_batch(split_batch(source.batch_at(at, {}), options.microbatches), mesh)

    if options.dry_run:
        operations = 4 * forward_operations(config, options.batch_size * length, length)
        print(*estimate(step, state, frozen, batch_at(0), schedule.num_steps, operations), sep="\n")
        return 0
    student = Decoder(config, choose_backend("float32", scan_layers=True))
    against = DraftEvaluation(teacher.programs.decoder, student, frozen, rows.held_out)
    evaluation = RoundedEvaluation(against, form)
    claim_folder(options.out, told)  # before anything is computed
    before = evaluation.measure(state.params)
    title = f"{options.model} in {options.weights}"
    result = fit_and_draw(
        title, step, state, frozen, batch_at, fit_settings(options, schedule.num_steps, told), evaluation
    )
    if result.interrupted:
        return EXIT_INTERRUPTED
    export(options, teacher, form, told, result, (before, evaluation.measure(result.params)), rows)
    return 0


def export(
    options: argparse.Namespace,
    teacher: LanguageModel,
    form: Format,
    told: dict[str, Any],
    result: FitResult,
    figures: tuple[DraftFigures, DraftFigures],
    rows: TextRows,
) -> None:
    """Write the best parameters' codes with a card; an existing folder is replaced as a whole."""
    before, after = figures
    folder = options.out / MODEL
    about = [
        f"Weights in {options.weights}, trained to say what those of {options.model}, fingerprint `{told['base']}`,",
        "say in many bits. Drafters of that model fit this one too.",
    ]
    lines = [
        "Over the tokens of held-out answers, against the weights as they were:",
        "",
        "| | rounded | trained |",
        "|---|---|---|",
        f"| KL, nats | {before.divergence:.4f} | {after.divergence:.4f} |",
        f"| same best token | {100 * before.agreement:.1f}% | {100 * after.agreement:.1f}% |",
    ]
    title, use = f"{options.model} in {options.weights}", "jaxinfer generate --model FOLDER ..."
    card = describe_model(title, about, use, lines, told, result, rows.num_predicted)
    params = in_few_bits(jax.device_get(result.params), form, f"--weights {options.weights}")
    lm = teacher.changed(jax.device_put(params, jax.devices()[0]), is_rounded=True)
    lm.save(folder, overwrite=True)
    try:
        (folder / CARD).write_text(card)
    except OSError as error:
        raise WriteFailed(f"{folder / CARD}: {error.strerror}; the model itself is whole") from None
    print(
        f"{folder}: {result.best_step} steps, KL {before.divergence:.4f} rounded and {after.divergence:.4f} trained; "
        f"use it with --model {folder}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(run_command("qat", "Train a model for few bits.", add_arguments, run))
