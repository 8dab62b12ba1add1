"""Medusa-2: trains a model and its heads together (Cai et al., 2401.10774), by ``python -m train.medusa --joint``.

``two-stage`` continues with heads that were trained on the frozen model (``--heads-from``), on any texts.
``self-distillation`` keeps the model close to the original, on texts that the model wrote. Both change the model:
``OUT/model`` is written beside ``OUT/heads``, which draft only for it.
"""

import argparse
import sys
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinfer.checkpoint.drafters.heads import read_heads
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.notation import Params
from train.arguments import (
    add_remat_argument,
    add_row_length_argument,
    build_schedule,
    check_batch,
    fit_settings,
    identity,
    read_data,
    refuse_few_bits,
)
from train.command import EXIT_INTERRUPTED, number
from train.heads.card import describe_recipe
from train.heads.export import export_heads
from train.heads.joint_loss import JointBatch, JointEvaluation, JointLoss, as_joint_batch, ramp_at
from train.heads.loss import HeadLoss
from train.heads.shapes import HeadShape, frozen_heads, init_heads, read_shape, shape_of
from train.loop.estimate import estimate
from train.loop.fit import FitResult, claim_folder, fit_and_draw
from train.loop.operations import forward_operations
from train.loop.placement import build_mesh, place_base, place_batch, place_learned, replicate
from train.loop.step import StepSettings, TrainState, compile_step
from train.model.lora import init_lora, merge_lora
from train.model.quantized import BITS, dequantized, quantize_base
from train.texts.batches import Batch
from train.texts.packing import Order, split_batch
from train.texts.rows import batches_of, pack_texts, take_rows

MODEL = "model"
JOINT_OPTIONS = (
    *("heads_from", "lora_rank", "lora_alpha", "quantize", "heads_weight", "ramp", "heads_rate"),
    *("row_length", "remat"),
)


def add_joint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of joint training."""
    joint = parser.add_argument_group("joint training (Medusa-2)")
    positive = number(float, 1e-9)
    joint.add_argument(
        "--joint", choices=("two-stage", "self-distillation"), help="train the model together with its heads"
    )
    joint.add_argument("--heads-from", metavar="FOLDER", help="start from the heads of an earlier run")
    joint.add_argument(
        "--lora-rank",
        metavar="R",
        type=number(int, 0),
        default=32,
        help="rank of the adapters; 0 trains all weights (default: %(default)s)",
    )
    joint.add_argument(
        "--lora-alpha", metavar="X", type=positive, default=16.0, help="scale of the adapters (default: %(default)s)"
    )
    joint.add_argument("--quantize", choices=BITS, help="keep the frozen base model in few bits (QLoRA)")
    help_weight = "weight of the heads in the loss (default: two-stage 0.2, self-distillation 0.01)"
    joint.add_argument("--heads-weight", metavar="C", type=positive, help=help_weight)
    joint.add_argument(
        "--ramp",
        choices=("constant", "linear", "sine"),
        help="how that weight grows (default: two-stage constant, self-distillation sine)",
    )
    joint.add_argument(
        "--heads-rate",
        metavar="X",
        type=positive,
        default=4.0,
        help="learning rate of the heads, times --learning-rate (default: %(default)s)",
    )
    add_row_length_argument(joint)
    add_remat_argument(joint)


def run_joint(options: argparse.Namespace) -> int:
    """Train, draw the curves, write the model and its heads."""
    rows = check_batch(options)
    if options.joint == "two-stage" and options.heads_from is None:
        raise InvalidOption("--joint two-stage goes on with heads of an earlier run: add --heads-from FOLDER")
    if options.quantize and not options.lora_rank:
        raise InvalidOption("--quantize freezes the base: give a --lora-rank of 1 or more")
    # Scanned: compiling a step through unrolled layers and back takes minutes.
    lm = load(options.model, dtype=options.dtype, scan_layers=True, notice=lambda line: print(line, file=sys.stderr))
    refuse_few_bits(lm.params, f"--model {options.model}")
    examples = read_data(options, lm, options.row_length)
    mesh = build_mesh(options.mesh, lm.config, rows)
    base = fingerprint(lm.params)
    told = {"base": base, **identity(options)}
    if not options.dry_run:
        claim_folder(options.out, told)
    texts = pack_texts(examples, options.row_length, options.held_out, options.seed)
    params = place_base(lm.params, lm.config, lm.backend, mesh)
    shape, heads = start_heads(options, lm, texts.trained)
    frozen = {"params": params, "heads": frozen_heads(shape, lm.config, lm.params)}
    if options.quantize:
        frozen = {**frozen, "params": quantize_base(params, options.quantize)}
    learned = place_learned({"heads": heads}, mesh) | start_base(options, params, mesh)
    order = Order(len(texts.trained.tokens_BT), options.batch_size, options.seed)
    schedule = build_schedule(options, order.steps_per_epoch)
    optimizer = optax.chain(schedule.build_optimizer(), raise_rate(learned, options.heads_rate))
    decoder = Decoder(lm.config, replace(lm.backend, remat_layers=options.remat))
    loss = JointLoss(
        HeadLoss(decoder, options.decay, options.soft_targets, options.dropout), options.joint, lora_scale(options)
    )
    step = compile_step(loss, optimizer, StepSettings(options.microbatches, options.compute_dtype, options.seed))
    state = TrainState(replicate(jnp.int32(0), mesh), learned, optimizer.init(learned))
    rows_of_V = shape.target_rows(lm.config.vocab_size)

    def batch_at(at: int) -> JointBatch:
        weight = heads_weight(options, at, schedule.num_steps)
        batch = as_joint_batch(take_rows(texts.trained, order.at(at)), rows_of_V, weight)
        return place_batch(split_batch(batch, options.microbatches), mesh)

    if options.dry_run:
        # A forward pass and two for the backward pass; self-distillation also runs the original base.
        passes = 4 if options.joint == "self-distillation" else 3
        operations = passes * forward_operations(lm.config, options.batch_size * options.row_length, options.row_length)
        print(*estimate(step, state, frozen, batch_at(0), schedule.num_steps, operations), sep="\n")
        return 0
    batches = [
        jax.tree.map(lambda leaf: leaf[0], place_batch(split_batch(as_joint_batch(part, rows_of_V, 1.0), 1), mesh))
        for part in batches_of(texts.held_out, rows)
    ]
    evaluation = JointEvaluation(decoder, frozen, batches, lora_scale(options))
    title, settings = f"{options.model} and its heads", fit_settings(options, schedule.num_steps, told)
    result = fit_and_draw(title, step, state, frozen, batch_at, settings, evaluation)
    if result.interrupted:
        return EXIT_INTERRUPTED
    export(options, lm, shape, frozen, result, evaluation, texts.num_predicted)
    return 0


def start_heads(options: argparse.Namespace, lm: LanguageModel, rows: Batch) -> tuple[HeadShape, Params]:
    """Return heads in float32: from ``--heads-from``, or new ones."""
    if options.heads_from is None:
        shape = read_shape(options, lm, np.asarray(rows.tokens_BT)[np.asarray(rows.mask_BT)])
        return shape, init_heads(shape, lm.config, lm.params, jax.random.key(options.seed))
    folder, backend = Path(expanduser(options.heads_from)), replace(lm.backend, param_dtype="float32")
    found = read_heads(folder, lm.config, backend, fingerprint=lambda: lm.fingerprint)
    return shape_of(found), {"heads": found["heads"]}


def start_base(options: argparse.Namespace, params: Params, mesh: Any) -> Params:
    """Return the trained part of the model: adapters, or all parameters in float32."""
    if not options.lora_rank:
        # Copied: a step consumes them, and the loss may need the original base.
        return {"base": jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)}
    return {"lora": replicate(init_lora(params, options.lora_rank, jax.random.key(options.seed + 1)), mesh)}


def lora_scale(options: argparse.Namespace) -> float:
    """Return the factor of the adapters."""
    return options.lora_alpha / max(options.lora_rank, 1)


def heads_weight(options: argparse.Namespace, step: int, num_steps: int) -> float:
    """Return c s(t) of the loss."""
    alone = options.joint == "self-distillation"
    coefficient = options.heads_weight or (0.01 if alone else 0.2)
    return coefficient * ramp_at(options.ramp or ("sine" if alone else "constant"), step, num_steps)


def export(
    options: argparse.Namespace,
    lm: LanguageModel,
    shape: HeadShape,
    frozen: Params,
    result: FitResult,
    evaluation: JointEvaluation,
    num_tokens: int,
) -> None:
    """Write the model with its adapters merged, and the heads for it."""
    base = dequantized(frozen["params"])
    if "lora" in result.params:
        merged = merge_lora(base, result.params["lora"], lora_scale(options))
    else:
        merged = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), result.params["base"], base)
    accuracies, loss = evaluation.measure({"base": merged, "heads": result.params["heads"]})
    lm.params = merged
    folder = lm.save(options.out / MODEL, overwrite=True)
    (folder / "README.md").write_text(describe_base(options, fingerprint(merged), result, loss), encoding="utf-8")
    print(f"{folder}: the model, {loss:.3f} nats a token on the held-out texts", file=sys.stderr)
    facts = {"next_token_loss": round(loss, 4), "trained_from": options.model}
    export_heads(
        options,
        lm,
        fingerprint(lm.params),
        shape,
        result.params["heads"],
        result,
        accuracies,
        num_tokens,
        str(folder),
        facts,
    )


def describe_base(options: argparse.Namespace, own: str, result: FitResult, loss: float) -> str:
    """Return the trained model's card, in Markdown."""
    return "\n".join(
        [
            f"# {options.model}, trained together with Medusa heads",
            "",
            f"Fingerprint `{own}`; begun from {options.model}, {options.joint}, {result.best_step} steps on "
            f"{', '.join(path.name for path in options.data)}. It writes other texts than it did before: "
            f"{loss:.4f} nats a token on texts that were held out. `../heads` draft for it.",
            "",
            *describe_recipe(identity(options)),
            "",
        ]
    )


def raise_rate(learned: Params, multiple: float) -> optax.GradientTransformation:
    """Multiply the heads' learning rate; an AdamW update is proportional to it."""
    labels = {name: "heads" if name == "heads" else "base" for name in learned}
    return optax.multi_transform({"heads": optax.scale(multiple), "base": optax.identity()}, labels)
