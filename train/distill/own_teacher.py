"""Trains a changed copy of a model to say what the model says, of which it is its own teacher.

`train.qat` rounds the copy's weights, `train.relufy` gives it another activation.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.language_model import LanguageModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.notation import Params
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
    read_data,
)
from train.command import EXIT_INTERRUPTED
from train.distill.divergences import forward_kl
from train.distill.evaluation import DraftEvaluation, DraftFigures
from train.distill.loss import DistillBatch, DistillLoss
from train.distill.samples import DistillSource
from train.loop.estimate import estimate
from train.loop.fit import FitResult, claim_folder, fit_and_draw
from train.loop.operations import forward_operations
from train.loop.placement import build_mesh, place_base, place_batch, start_state
from train.loop.step import StepSettings, Tally, compile_step
from train.model.card import describe_model
from train.texts.packing import Order, split_batch
from train.texts.rows import TextRows, pack_texts, row_length

# The folder of a run that the model is written to.
MODEL = "model"


def unchanged(params: Params) -> Params:
    """Return parameters as they are."""
    return params


@dataclass(frozen=True)
class Change:
    """How a copy differs from its teacher, whose weights it begins with.

    ``title`` names it on its curves and its card. ``prepare`` makes the parameters that it computes with of those that
    are trained; gradients pass through it.
    """

    title: str
    config: DecoderConfig
    sparsity: Sparsity | None = None
    prepare: Callable[[Params], Params] = unchanged


@dataclass(frozen=True)
class ChangedLoss:
    """Distillation of a student that computes with what ``prepare`` makes of its parameters."""

    distill: DistillLoss
    prepare: Callable[[Params], Params]

    def __call__(self, trained: Params, frozen: Params, batch: DistillBatch, key: jax.Array) -> Tally:
        """Tally one batch."""
        return self.distill(self.prepare(trained), frozen, batch, key)


@dataclass
class ChangedEvaluation:
    """Evaluates what ``prepare`` makes of parameters; the score is the divergence from the teacher, negated."""

    against: DraftEvaluation
    prepare: Callable[[Params], Params]

    def __call__(self, trained: Params) -> Mapping[str, Any]:
        """Return the figures as JSON values."""
        found = self.measure(trained)
        return {"score": -found.divergence, "divergence": found.divergence, "agreement": round(found.agreement, 4)}

    def measure(self, trained: Params) -> DraftFigures:
        """Return the figures of trained parameters."""
        return self.against.measure(self._compiled(trained))

    @cached_property
    def _compiled(self) -> Callable[[Params], Params]:
        return jax.jit(self.prepare)


class Trained(NamedTuple):
    """What a run came to, and what it was told; the figures are those before the first step and those of the result."""

    told: Mapping[str, Any]
    result: FitResult
    before: DraftFigures
    after: DraftFigures
    rows: TextRows


def add_own_teacher_arguments(parser: argparse.ArgumentParser, learning_rate: float) -> None:
    """Add the arguments of `train_changed`."""
    add_run_arguments(parser, "what is trained, and its own teacher")
    data = add_data_arguments(parser)
    add_length_argument(data)
    add_hard_targets_argument(data)
    steps = add_step_arguments(parser, items="rows", learning_rate=learning_rate)
    add_remat_argument(steps)


def train_changed(options: argparse.Namespace, teacher: LanguageModel, change: Change) -> Trained | int:
    """Train a copy and draw the curves; return an exit code where that is all: of a dry run, or an interrupted one."""
    microbatch, length = check_batch(options), row_length(options, change.config.max_position)
    rows = pack_texts(read_data(options, teacher, length), length, options.held_out, options.seed)
    mesh = build_mesh(options.mesh, change.config, microbatch)
    told = {"base": teacher.fingerprint, **identity(options)}
    frozen = place_base(teacher.params, teacher.config, teacher.backend, mesh)
    plain = replace(choose_backend("float32", scan_layers=True), sparsity=change.sparsity)
    backend = replace(
        choose_backend(options.compute_dtype or "float32", scan_layers=True),
        sparsity=change.sparsity,
        remat_layers=options.remat,
    )
    # Copied: a train step consumes its parameters, and the teacher is still needed.
    begun = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), teacher.params)
    order = Order(len(rows.trained.tokens_BT), options.batch_size, options.seed)
    schedule = build_schedule(options, order.steps_per_epoch)
    optimizer = schedule.build_optimizer()
    state = start_state(place_base(begun, change.config, backend, mesh), optimizer, mesh)
    decoders = teacher.programs.decoder, Decoder(change.config, backend)
    loss = ChangedLoss(DistillLoss(*decoders, forward_kl, hard=options.hard_targets), change.prepare)
    step = compile_step(loss, optimizer, StepSettings(options.microbatches, options.compute_dtype, options.seed))
    source = DistillSource(rows.trained, order, options.seed)

    def batch_at(at: int) -> Any:
        return place_batch(split_batch(source.batch_at(at, {}), options.microbatches), mesh)

    if options.dry_run:
        operations = 4 * forward_operations(change.config, options.batch_size * length, length)
        print(*estimate(step, state, frozen, batch_at(0), schedule.num_steps, operations), sep="\n")
        return 0
    against = DraftEvaluation(teacher.programs.decoder, Decoder(change.config, plain), frozen, rows.held_out)
    evaluation = ChangedEvaluation(against, change.prepare)
    claim_folder(options.out, told)  # before anything is computed
    before = evaluation.measure(state.params)
    settings = fit_settings(options, schedule.num_steps, told)
    result = fit_and_draw(change.title, step, state, frozen, batch_at, settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    return Trained(told, result, before, evaluation.measure(result.params), rows)


def describe_changed(
    change: Change, trained: Trained, about: list[str], against: str, begun: str, use: str, more: tuple[str, ...] = ()
) -> str:
    """Return a model's card, with a table of what it is beside its teacher: as it was ``begun``, and trained."""
    before, after = trained.before, trained.after
    lines = [
        f"Over the tokens of held-out answers, against {against}:",
        "",
        f"| | {begun} | trained |",
        "|---|---|---|",
        f"| KL, nats | {before.divergence:.4f} | {after.divergence:.4f} |",
        f"| same best token | {100 * before.agreement:.1f}% | {100 * after.agreement:.1f}% |",
        *more,
    ]
    return describe_model(change.title, about, use, lines, trained.told, trained.result, trained.rows.num_predicted)
