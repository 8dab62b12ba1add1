"""``python -m train.distill``: trains a small model to predict a large one, and so to draft for it.

It learns from the teacher's distribution at every token of given texts, of the teacher's own answers (``python -m
train.data distill``), or of its own samples, ``--on-policy`` (GKD, 2306.13649; DistillSpec, 2310.08461). It writes the
folder ``OUT/draft``, which ``--strategy draft_model:model=OUT/draft`` loads.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.notation import Params
from jaxinfer.ops.backend import choose_backend
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
    refuse_changed,
    refuse_few_bits,
)
from train.command import EXIT_INTERRUPTED, number, run_command
from train.distill.divergences import DIVERGENCES, Divergence, jensen_shannon
from train.distill.evaluation import DraftEvaluation, DraftFigures
from train.distill.loss import DistillLoss
from train.distill.samples import DistillSource, SampleSettings, StudentSamples
from train.distill.student import Student, choose_layers, open_student, prune_layers
from train.loop.estimate import estimate
from train.loop.fit import FitResult, claim_folder, fit_and_draw
from train.loop.operations import forward_operations
from train.loop.placement import build_mesh, place_base, place_batch, start_state
from train.loop.step import StepSettings, TrainState, compile_step
from train.model.card import describe_model
from train.model.folder import check_writable, write_model
from train.texts.packing import Order, split_batch
from train.texts.rows import TextRows, pack_texts, row_length

DRAFT, SAMPLES = "draft", "samples"
_DRAFTS = 4  # the draft length for the card's tokens per step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.distill``."""
    whole, share = number(int, 1), number(float, 0, 1)
    add_run_arguments(parser, "the teacher")
    student = parser.add_mutually_exclusive_group(required=True)
    student.add_argument("--student", metavar="S", help="start from this model, or from a config.json with new weights")
    student.add_argument(
        "--student-layers", metavar="N|I,J,...", help="start from N of the teacher's layers, or from layers I,J,..."
    )
    data = add_data_arguments(parser)
    add_length_argument(data)
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--divergence", choices=tuple(DIVERGENCES), default="forward_kl", help="what to minimise (default: %(default)s)"
    )
    loss.add_argument(
        "--beta", metavar="B", type=share, default=0.5, help="beta of jensen_shannon (default: %(default)s)"
    )
    loss.add_argument(
        "--temperature",
        metavar="T",
        type=number(float, 1e-3),
        default=1.0,
        help="temperature of both models (default: %(default)s)",
    )
    add_hard_targets_argument(loss)
    policy = parser.add_argument_group("on-policy data")
    policy.add_argument(
        "--on-policy",
        metavar="P",
        type=share,
        default=0.0,
        help="share of rows that the student writes itself (default: 0)",
    )
    policy.add_argument(
        "--resample-every", metavar="N", type=whole, default=50, help="steps between new samples (default: %(default)s)"
    )
    policy.add_argument(
        "--samples", metavar="N", type=whole, default=128, help="samples each time (default: %(default)s)"
    )
    policy.add_argument(
        "--max-new-tokens", metavar="N", type=whole, default=128, help="of each sample (default: %(default)s)"
    )
    steps = add_step_arguments(parser, items="rows", learning_rate=3e-4)
    add_remat_argument(steps)


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves and write the draft model."""
    microbatch = check_batch(options)
    if options.divergence != "jensen_shannon":
        refuse_changed(options, add_arguments, "--divergence jensen_shannon", ("beta",))
    if not options.on_policy:
        refuse_changed(options, add_arguments, "--on-policy", ("resample_every", "samples", "max_new_tokens"))
    teacher = load_base(options, scan_layers=True)
    checkpoint = open_checkpoint(options.model)
    student = begin_student(options, teacher)
    refuse_few_bits(student.params, f"the student, {student.origin}")
    check_writable(student.config, checkpoint, teacher.tokenizer)
    length = row_length(options, min(teacher.config.max_position, student.config.max_position))
    rows = pack_texts(read_data(options, teacher, length), length, options.held_out, options.seed)
    mesh = build_mesh(options.mesh, student.config, microbatch)
    build_mesh(options.mesh, teacher.config, microbatch)  # raises an error for a teacher that does not split
    told = {"base": fingerprint(teacher.params), "begun_from": fingerprint(student.params), **identity(options)}
    frozen = place_base(teacher.params, teacher.config, teacher.backend, mesh)
    backend = replace(choose_backend(options.compute_dtype or "float32", scan_layers=True), remat_layers=options.remat)
    decoders = teacher.programs.decoder, Decoder(student.config, backend)
    order = Order(len(rows.trained.tokens_BT), options.batch_size, options.seed)
    schedule = build_schedule(options, order.steps_per_epoch)
    optimizer = schedule.build_optimizer()
    state = start_state(place_base(student.params, student.config, backend, mesh), optimizer, mesh)
    loss = DistillLoss(*decoders, divergence_of(options), options.temperature, options.hard_targets)
    step = compile_step(loss, optimizer, StepSettings(options.microbatches, options.compute_dtype, options.seed))
    source = build_source(options, student, teacher, rows, order, length)

    def place(at: int, params: Params) -> Any:
        return place_batch(split_batch(source.batch_at(at, params), options.microbatches), mesh)

    def sampled_step(state: TrainState, frozen: Any, at: int) -> Any:
        return step(state, frozen, place(at, state.params))

    if options.dry_run:
        source = replace(source, samples=None)
        num_tokens = options.batch_size * length
        operations = sum(
            passes * forward_operations(config, num_tokens, length)
            for passes, config in ((1, teacher.config), (3, student.config))
        )
        print(*estimate(step, state, frozen, place(0, state.params), schedule.num_steps, operations), sep="\n")
        return 0
    evaluation = DraftEvaluation(
        teacher.programs.decoder,
        Decoder(student.config, choose_backend("float32", scan_layers=True)),
        frozen,
        rows.held_out,
        options.temperature,
    )
    claim_folder(options.out, told)  # before anything is computed
    before = evaluation.measure(state.params)
    settings = fit_settings(options, schedule.num_steps, told)
    title = f"a draft model for {options.model}"
    result = fit_and_draw(title, sampled_step, state, frozen, lambda at: at, settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    figures = before, evaluation.measure(result.params)
    export(options, teacher, checkpoint, student, told, result, figures, rows)
    return 0


def begin_student(options: argparse.Namespace, teacher: LanguageModel) -> Student:
    """Return the student for the options."""
    if options.student is not None:
        return open_student(options.student, teacher, options.seed)
    return prune_layers(teacher, choose_layers(options.student_layers, teacher.config.num_layers))


def divergence_of(options: argparse.Namespace) -> Divergence:
    """Return the divergence for the options."""
    if options.divergence == "jensen_shannon":
        return partial(jensen_shannon, beta=options.beta)
    return DIVERGENCES[options.divergence]


def build_source(
    options: argparse.Namespace, student: Student, teacher: LanguageModel, rows: TextRows, order: Order, length: int
) -> DistillSource:
    """Return the source of batches."""
    fixed = DistillSource(rows.trained, order, options.seed, options.on_policy)
    if not options.on_policy:
        return fixed
    backend = choose_backend("float32", scan_layers=True)
    writer = LanguageModel(student.config, student.params, backend, tokenizer=teacher.tokenizer)
    settings = SampleSettings(
        options.out / SAMPLES,
        options.resample_every,
        options.samples,
        options.max_new_tokens,
        options.temperature,
        length,
        options.seed,
    )
    return replace(fixed, samples=StudentSamples(writer, rows.prompts, settings))


def export(
    options: argparse.Namespace,
    teacher: LanguageModel,
    checkpoint: Checkpoint,
    student: Student,
    told: dict[str, Any],
    result: FitResult,
    figures: tuple[DraftFigures, DraftFigures],
    rows: TextRows,
) -> None:
    """Write the best student with its card; an existing folder is replaced as a whole."""
    before, after = figures
    folder = options.out / DRAFT
    about = [
        f"It began as {student.origin}, with {student.config.num_layers} layers. Its teacher is {options.model},",
        f"fingerprint `{told['base']}`; it changes no token of what the teacher writes.",
    ]
    lines = [
        "Over the tokens of held-out answers, each drafted after the answer's own tokens, "
        f"at temperature {options.temperature:g}:",
        "",
        "| | before | after |",
        "|---|---|---|",
        f"| acceptance, `sum min(p, q)` | {100 * before.acceptance:.1f}% | {100 * after.acceptance:.1f}% |",
        f"| greedy agreement | {100 * before.agreement:.1f}% | {100 * after.agreement:.1f}% |",
        f"| KL(teacher, student), nats | {before.divergence:.3f} | {after.divergence:.3f} |",
        f"| tokens a step of {_DRAFTS} drafts | {before.tokens_per_step(_DRAFTS):.2f} | "
        f"{after.tokens_per_step(_DRAFTS):.2f} |",
    ]
    use = "jaxinfer generate --strategy draft_model:model=FOLDER,verify=rejection ..."
    title = f"A draft model for {options.model}"
    card = describe_model(title, about, use, lines, told, result, rows.num_predicted)
    write_model(folder, student.config, result.params, teacher.backend.param_dtype, checkpoint, teacher.tokenizer, card)
    print(
        f"{folder}: {result.best_step} steps, acceptance {before.acceptance:.3f} before and {after.acceptance:.3f} "
        f"after; draft with --strategy draft_model:model={folder}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(run_command("distill", "Train a draft model by distillation.", add_arguments, run))
