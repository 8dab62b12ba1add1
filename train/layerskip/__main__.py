"""``python -m train.layerskip``: trains a model whose first layers draft for all of them (Elhoushi et al., 2404.16710).

It trains the whole model, from scratch or further, or only low-rank adapters. Every exit learns to predict the next
token through the shared norm and output matrix, while layers are dropped at random. The folder ``OUT/model`` is a
normal model, which drafts for itself with ``--strategy layerskip``.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import CheckpointNotFound
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.models.decoder import Decoder, init_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.notation import Params
from jaxinfer.ops.backend import choose_backend, default_dtype, default_platform
from jaxinfer.tokenizers import load_tokenizer
from train.arguments import (
    add_data_arguments,
    add_length_argument,
    add_remat_argument,
    add_run_arguments,
    add_step_arguments,
    build_schedule,
    check_batch,
    fit_settings,
    identity,
    read_data,
    refuse_changed,
    refuse_few_bits,
)
from train.command import EXIT_INTERRUPTED, number, run_command
from train.layerskip.evaluation import ExitEvaluation, choose_exit
from train.layerskip.loss import ExitBatch, ExitLoss, check_layers
from train.layerskip.schedules import CURRICULA, Curriculum, ExitSchedule
from train.loop.estimate import estimate
from train.loop.fit import FitResult, fit_and_draw
from train.loop.operations import forward_operations
from train.loop.placement import build_mesh, place_base, place_batch, replicate, start_state
from train.loop.step import StepSettings, cast_floats, compile_step
from train.model.card import describe_model
from train.model.folder import check_writable, write_model
from train.model.lora import init_lora, merge_lora, with_lora
from train.texts.packing import Order, split_batch
from train.texts.rows import TextRows, pack_texts, row_length, take_rows

MODEL = "model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``python -m train.layerskip``."""
    whole, share = number(int, 1), number(float, 0, 1)
    add_run_arguments(parser, "the model to train on")
    parser.add_argument(
        "--init",
        metavar="CONFIG",
        type=Path,
        help="train a new model from this config.json, with the tokenizer beside it",
    )
    data = add_data_arguments(parser)
    add_length_argument(data)
    exits = parser.add_argument_group("exits")
    exits.add_argument(
        "--max-drop", metavar="P", type=share, default=0.1, help="dropout rate of the last layer (default: %(default)s)"
    )
    exits.add_argument(
        "--exit-scale",
        metavar="X",
        type=number(float, 0),
        default=0.2,
        help="weight of the early exits in the loss (default: %(default)s)",
    )
    exits.add_argument(
        "--curriculum",
        choices=CURRICULA,
        default="rotational",
        help="which exits each step trains (default: %(default)s)",
    )
    exits.add_argument(
        "--rotate", metavar="R", type=whole, help="each step trains every R-th exit (default: a quarter of the layers)"
    )
    exits.add_argument(
        "--lora-rank",
        metavar="N",
        type=number(int, 0),
        default=0,
        help="train adapters of this rank; 0 trains all weights (default: 0)",
    )
    exits.add_argument(
        "--lora-alpha",
        metavar="X",
        type=number(float, 0),
        default=16.0,
        help="scale of the adapters (default: %(default)s)",
    )
    steps = add_step_arguments(parser, items="rows", learning_rate=3e-4)
    add_remat_argument(steps)


@dataclass(frozen=True)
class Adapted:
    """A base with adapters, when only the adapters are trained."""

    scale: float
    dtype: str

    def __call__(self, lora: Params, base: Params) -> Params:
        """Return the parameters for a training pass."""
        return with_lora(cast_floats(base, self.dtype), lora, self.scale)


class Trained(NamedTuple):
    """The trained parameters, the frozen ones, and the model that both form."""

    params: Params
    frozen: Any
    assemble: Callable[[Any, Any], Params]
    finish: Callable[[Any], Params]


def run(options: argparse.Namespace) -> int:
    """Train, draw the curves and write the model."""
    microbatch = check_batch(options)
    if options.curriculum != "rotational":
        refuse_changed(options, add_arguments, "--curriculum rotational", ("rotate",))
    if not options.lora_rank:
        refuse_changed(options, add_arguments, "--lora-rank", ("lora_alpha",))
    if options.init is not None:
        refuse_changed(options, add_arguments, "training on a model, not --init", ("model",))
    lm, checkpoint = open_base(options)
    config, length = lm.config, row_length(options, lm.config.max_position)
    check_layers(config)
    check_writable(config, checkpoint, lm.tokenizer)
    rows = pack_texts(read_data(options, lm, length), length, options.held_out, options.seed)
    mesh = build_mesh(options.mesh, config, microbatch)
    base = fingerprint(lm.params)
    order = Order(len(rows.trained.tokens_BT), options.batch_size, options.seed)
    schedule = build_schedule(options, order.steps_per_epoch)
    exits = exit_schedule(options, config.num_layers, schedule.num_steps)
    compute_dtype = options.compute_dtype or "float32"
    decoder = Decoder(config, replace(choose_backend(compute_dtype, scan_layers=True), remat_layers=options.remat))
    trained = choose_trained(options, place_base(lm.params, config, lm.backend, mesh), mesh, compute_dtype)
    optimizer = schedule.build_optimizer()
    state = start_state(trained.params, optimizer, mesh)
    step_settings = StepSettings(options.microbatches, options.compute_dtype, options.seed)
    step = compile_step(ExitLoss(decoder, trained.assemble), optimizer, step_settings)

    def batch_at(at: int) -> ExitBatch:
        rates_BL, weights_BL = (
            np.broadcast_to(figures, (options.batch_size, config.num_layers))
            for figures in (exits.drop_rates(at), exits.exit_weights(at))
        )
        batch = ExitBatch(take_rows(rows.trained, order.at(at)), rates_BL, weights_BL)
        return cast(ExitBatch, place_batch(split_batch(batch, options.microbatches), mesh))

    if options.dry_run:
        num_exits = np.mean([np.count_nonzero(exits.exit_weights(at)) for at in range(schedule.num_steps)])
        operations = 3 * forward_operations(config, options.batch_size * length, length, float(num_exits))
        print(*estimate(step, state, trained.frozen, batch_at(0), schedule.num_steps, operations), sep="\n")
        return 0
    told = {"base": base, **identity(options), "init": None if options.init is None else options.init.name}
    settings = fit_settings(options, schedule.num_steps, told)
    evaluation = ExitEvaluation(Decoder(config, lm.backend), trained.finish, rows.held_out, exits.all_exits())
    title = f"early exits of {name_of(options)}"
    result = fit_and_draw(title, step, state, trained.frozen, batch_at, settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    export(options, lm, checkpoint, trained.finish(result.params), told, result, evaluation, rows)
    return 0


def name_of(options: argparse.Namespace) -> str:
    """Return the name of the run's starting point."""
    return str(options.model if options.init is None else options.init)


def open_base(options: argparse.Namespace) -> tuple[LanguageModel, Checkpoint]:
    """Return the starting model, in float32 with stacked layers, and the source of its tokenizer."""
    notice = lambda line: print(line, file=sys.stderr)  # noqa: E731
    if options.init is None:
        lm = load(options.model, dtype="float32", scan_layers=True, notice=notice)
        refuse_few_bits(lm.params, f"--model {options.model}")
        return lm, open_checkpoint(options.model)
    path = options.init / "config.json" if options.init.is_dir() else options.init
    if not path.is_file():
        raise CheckpointNotFound(f"{path}: no such file; give --init the config.json of the model to draw")
    description, backend = read_json_object(path), choose_backend("float32", scan_layers=True)
    family = family_of(description)
    config = family.translate(description)
    params = init_params(config, backend, jax.random.key(options.seed))
    tensors = LoadedTensors(params, family.tensor_names(config), None)
    checkpoint = Checkpoint(str(path.parent), description, tensors, folder=path.parent)
    return LanguageModel(config, params, backend, checkpoint, tokenizer=load_tokenizer(checkpoint)), checkpoint


def exit_schedule(options: argparse.Namespace, num_layers: int, num_steps: int) -> ExitSchedule:
    """Return the schedules for the options."""
    return ExitSchedule(
        num_layers,
        num_steps,
        options.max_drop,
        options.exit_scale,
        cast(Curriculum, options.curriculum),
        options.rotate or max(1, num_layers // 4),
        from_scratch=options.init is not None,
    )


def choose_trained(options: argparse.Namespace, params: Params, mesh: Any, compute_dtype: str) -> Trained:
    """Return the model's parameters, or adapters for them."""
    if not options.lora_rank:
        return Trained(params, None, lambda trained, frozen: trained, lambda trained: trained)
    scale = options.lora_alpha / options.lora_rank
    lora = replicate(init_lora(params, options.lora_rank, jax.random.key(options.seed)), mesh)
    merge = jax.jit(partial(merge_lora, scale=scale))
    return Trained(lora, params, Adapted(scale, compute_dtype), lambda trained: merge(params, trained))


def export(
    options: argparse.Namespace,
    lm: LanguageModel,
    checkpoint: Checkpoint,
    params: Params,
    told: dict[str, Any],
    result: FitResult,
    evaluation: ExitEvaluation,
    rows: TextRows,
) -> None:
    """Write the best model with its card; an existing folder is replaced as a whole."""
    found = evaluation.measure(params)
    choice = choose_exit(found.acceptance[:-1])
    folder = options.out / MODEL
    use = f"jaxinfer generate --model FOLDER --strategy {choice.strategy} ..."
    figures = [
        "How often the best token of the exit after each layer is the whole model's, as a greedy draft is accepted,",
        "and the cross-entropy of that exit, in nats:",
        "",
        "| exit_layer | acceptance | loss |",
        "|---|---|---|",
        *(
            f"| {layer} | {100 * rate:.1f}% | {loss:.3f} |"
            for layer, (rate, loss) in enumerate(zip(found.acceptance, found.losses), 1)
        ),
        "",
        f"By the layers that are read, most is gained with `--strategy {choice.strategy}`: "
        f"{choice.tokens_per_step:.2f} tokens a step, {choice.speedup:.2f} times as many a layer read as without.",
    ]
    began = "from new weights, fingerprint" if options.init else f"from {options.model}, fingerprint"
    about = [f"Trained {began} `{told['base']}`, with layer dropout and", "early exits (LayerSkip, 2404.16710)."]
    card = describe_model(
        f"A model that drafts for itself, from {name_of(options)}", about, use, figures, told, result,
        rows.num_predicted,
    )  # fmt: skip
    dtype = options.dtype or default_dtype(default_platform())
    write_model(folder, lm.config, params, dtype, checkpoint, lm.tokenizer, card)
    print(f"{folder}: {result.best_step} steps; draft with --strategy {choice.strategy}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_command("layerskip", "Train a model whose first layers draft for it.", add_arguments, run))
