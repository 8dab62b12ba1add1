"""The arguments that all trainers share, and what they become: texts, their split, a schedule, the run's settings."""

import argparse
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import DEFAULT_MODEL, load
from jaxinfer.notation import Params
from jaxinfer.ops.backend import DTYPES
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.parallel.mesh import parse_mesh
from train.command import existing_file, number
from train.loop.fit import FitSettings
from train.loop.placement import place_batch, replicate
from train.loop.step import Loss, Metrics, Schedule, StepSettings, TrainState, compile_step
from train.texts.examples import read_examples
from train.texts.packing import Example, Order, split_batch

# Options that do not affect a run's result.
_FREE = ("out", "dry_run", "cache", "keep", "save_every")


def add_run_arguments(parser: argparse.ArgumentParser, model: str = "the base") -> None:
    """Add ``--model``, ``--dtype``, ``--mesh``, ``--out`` and ``--dry-run``."""
    parser.add_argument(
        "--model", metavar="M", default=DEFAULT_MODEL, help=f"{model}: hub id, folder or file (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        metavar="D",
        choices=DTYPES,
        help="dtype of the base model (default: float32 on a CPU, else bfloat16)",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXES",
        type=parse_mesh,
        default="data=1",
        help="how to split the work over devices, such as data=4 (default: one device)",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="folder of the run; an interrupted run goes on"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print parameters, memory and operations, and train nothing"
    )


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--weights``, the bits of a base that is not trained."""
    parser.add_argument(
        "--weights",
        metavar="W",
        help="keep the frozen base in few bits, as jaxinfer.load does: int8, int4:group=64, nf4:group=64, fp8 or gguf",
    )


def add_data_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add ``--data`` and ``--held-out``; return their group, for more."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        metavar="FILE",
        type=existing_file,
        nargs="+",
        required=True,
        help="training texts, as JSONL or plain text",
    )
    share = number(float, 0, 1)
    data.add_argument(
        "--held-out",
        metavar="P",
        type=share,
        default=0.05,
        help="share of the texts to evaluate on (default: %(default)s)",
    )
    return data


def add_cache_argument(data: argparse._ArgumentGroup) -> None:
    """Add ``--cache``, of hidden states that are computed once."""
    data.add_argument(
        "--cache",
        metavar="FOLDER",
        type=Path,
        help="folder of the base model's hidden states (default: OUT/hidden_states)",
    )


def cache_folder(options: argparse.Namespace) -> Path:
    """Return the folder of ``--cache``."""
    return options.cache or options.out / "hidden_states"


def add_row_length_argument(group: Any) -> None:
    """Add ``--row-length``, of rows that texts are packed into."""
    group.add_argument(
        "--row-length",
        metavar="T",
        type=number(int, 8),
        default=512,
        help="tokens of each packed row (default: %(default)s)",
    )


def add_soft_targets_argument(loss: argparse._ArgumentGroup) -> None:
    """Add ``--soft-targets``."""
    loss.add_argument(
        "--soft-targets",
        metavar="S",
        type=number(float, 0, 1),
        default=0.0,
        help="share of the base model's distribution in the targets (default: 0)",
    )


def add_loss_vocab_argument(loss: argparse._ArgumentGroup) -> None:
    """Add ``--loss-vocab``."""
    loss.add_argument(
        "--loss-vocab",
        metavar="N",
        type=number(int, 1),
        help="compute the loss over the N most frequent tokens (default: all)",
    )


def load_base(options: argparse.Namespace, **more: Any) -> LanguageModel:
    """Load ``--model`` in ``--dtype``, and what ``more`` asks of `jaxinfer.load`; notices go to standard error."""
    return load(options.model, dtype=options.dtype, notice=lambda line: print(line, file=sys.stderr), **more)


def refuse_few_bits(params: Params, named: str) -> None:
    """Raise InvalidOption, which begins with ``named``, if parameters that are to be trained are in few bits."""
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        raise InvalidOption(f"{named}: its weights are in few bits, which are not trained: give it in 16 or 32 bits")


def add_length_argument(data: argparse._ArgumentGroup) -> None:
    """Add ``--length``, of rows that texts are packed into."""
    data.add_argument(
        "--length",
        metavar="T",
        type=number(int, 1),
        help="tokens of each packed row (default: 512, or the context)",
    )


def add_remat_argument(group: argparse._ArgumentGroup) -> None:
    """Add ``--remat``."""
    group.add_argument("--remat", action="store_true", help="recompute each block in the backward pass, to save memory")


def add_hard_targets_argument(group: argparse._ArgumentGroup) -> None:
    """Add ``--hard-targets``, for losses of distillation."""
    group.add_argument(
        "--hard-targets",
        metavar="W",
        type=number(float, 0),
        default=0.0,
        help="weight of the texts' own tokens in the loss (default: 0)",
    )


def add_answer_arguments(parser: argparse.ArgumentParser, max_new_tokens: int, batch_size: int) -> None:
    """Add the arguments of commands that generate: ``--max-new-tokens``, ``--batch-size`` and ``--dtype``."""
    whole = number(int, 1)
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=whole,
        default=max_new_tokens,
        help="for each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=whole, default=batch_size, help="prompts at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", metavar="D", help="float32, bfloat16, float16 or float64 (default: float32 on a CPU, else bfloat16)"
    )


def add_step_arguments(
    parser: argparse.ArgumentParser,
    *,
    items: str,
    epochs: float = 2.0,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
) -> argparse._ArgumentGroup:
    """Add the arguments of optimization, evaluation and checkpoints; ``items`` names what a batch contains."""
    whole, share = number(int, 1), number(float, 0, 1)
    rate = number(float, 1e-9)
    steps = parser.add_argument_group("steps")
    steps.add_argument(
        "--epochs",
        metavar="N",
        type=number(float, 0.001),
        default=epochs,
        help="passes over the texts (default: %(default)s)",
    )
    steps.add_argument(
        "--batch-size", metavar="N", type=whole, default=batch_size, help=f"{items} in each step (default: %(default)s)"
    )
    steps.add_argument(
        "--microbatches",
        metavar="N",
        type=whole,
        default=1,
        help="split each step into N parts, to save memory (default: %(default)s)",
    )
    steps.add_argument(
        "--learning-rate",
        metavar="X",
        type=rate,
        default=learning_rate,
        help="peak learning rate (default: %(default)s)",
    )
    steps.add_argument(
        "--schedule",
        choices=("cosine", "linear", "constant"),
        default="cosine",
        help="schedule of the learning rate (default: %(default)s)",
    )
    steps.add_argument(
        "--warmup", metavar="P", type=share, default=0.1, help="share of the steps that warm up (default: %(default)s)"
    )
    steps.add_argument(
        "--weight-decay",
        metavar="X",
        type=number(float, 0),
        default=0.0,
        help="weight decay of AdamW (default: %(default)s)",
    )
    steps.add_argument(
        "--clip", metavar="X", type=rate, default=1.0, help="clip gradients to this norm (default: %(default)s)"
    )
    steps.add_argument(
        "--compute-dtype",
        metavar="D",
        choices=("bfloat16", "float32"),
        help="dtype to compute the trained part in (default: float32)",
    )
    steps.add_argument(
        "--eval-every", metavar="N", type=whole, default=200, help="steps between evaluations (default: %(default)s)"
    )
    steps.add_argument(
        "--patience",
        metavar="N",
        type=number(int, 0),
        default=0,
        help="stop after N evaluations without a gain (default: 0, never)",
    )
    steps.add_argument(
        "--save-every", metavar="N", type=whole, default=200, help="steps between checkpoints (default: %(default)s)"
    )
    steps.add_argument("--keep", metavar="N", type=whole, default=2, help="checkpoints to keep (default: %(default)s)")
    steps.add_argument("--seed", metavar="N", type=number(int, 0, 2**31 - 1), default=0, help="default: %(default)s")
    return steps


def identity(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a run's result depends on, as JSON values."""
    kept = {name: value for name, value in vars(options).items() if name not in _FREE}
    digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in options.data]
    data = [path.name for path in options.data]
    return {**kept, "mesh": str(options.mesh), "data": data, "data_digests": digests}


def refuse_changed(
    options: argparse.Namespace,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    needs: str,
    names: Sequence[str],
) -> None:
    """Raise InvalidOption for options that would have no effect, if they differ from their defaults.

    ``needs`` names what these options require.
    """
    add_arguments(parser := argparse.ArgumentParser())
    for name in names:
        if getattr(options, name) != parser.get_default(name):
            raise InvalidOption(f"--{name.replace('_', '-')} belongs to {needs}: leave it out, or change that")


def read_data(options: argparse.Namespace, lm: LanguageModel, longest: int | None = None) -> list[Example]:
    """Read the texts of ``--data``, none longer than ``longest`` tokens or the model's context.

    Raises an error for token ids that the model does not have: then another model wrote the answers.
    """
    most = min(longest or lm.config.max_position, lm.config.max_position)
    examples = []
    for path in options.data:
        found = read_examples(path, lm.tokenizer, most)
        largest = max(max(example.tokens) for example in found)
        if largest >= lm.config.vocab_size:
            raise InvalidOption(
                f"{path}: holds token id {largest}, but the base has {lm.config.vocab_size}: it is of another model"
            )
        examples += found
    return examples


def check_batch(options: argparse.Namespace) -> int:
    """Check the batch size; return the number of items per microbatch."""
    if options.batch_size % options.microbatches:
        raise InvalidOption(f"--batch-size {options.batch_size} does not split into {options.microbatches} parts")
    return options.batch_size // options.microbatches


def build_schedule(options: argparse.Namespace, steps_per_epoch: float) -> Schedule:
    """Return the schedule of the run's steps."""
    return Schedule(
        max(1, round(options.epochs * steps_per_epoch)),
        options.learning_rate,
        options.warmup,
        options.weight_decay,
        options.clip,
        options.schedule,
    )


class Prepared(NamedTuple):
    """What a run steps with; ``batch_at`` gives each step's batch, placed."""

    step: Callable[[TrainState, Any, Any], tuple[TrainState, Metrics]]
    state: TrainState
    batch_at: Callable[[int], Any]
    num_steps: int


def prepare(
    options: argparse.Namespace,
    loss: Loss,
    params: Params,
    count: int,
    sample: Callable[[np.ndarray, int], Any],
    mesh: Mesh,
) -> Prepared:
    """Return how to train parameters, whole on every device, on ``count`` items.

    ``sample`` makes a batch of the items that it is given, for a step.
    """
    order = Order(count, options.batch_size, options.seed)
    schedule = build_schedule(options, order.steps_per_epoch)
    optimizer = schedule.build_optimizer()
    learned = replicate(params, mesh)
    state = TrainState(replicate(jnp.int32(0), mesh), learned, optimizer.init(learned))
    step = compile_step(loss, optimizer, StepSettings(options.microbatches, options.compute_dtype, options.seed))

    def batch_at(at: int) -> Any:
        return place_batch(split_batch(sample(order.at(at), at), options.microbatches), mesh)

    return Prepared(step, state, batch_at, schedule.num_steps)


def fit_settings(options: argparse.Namespace, num_steps: int, told: Mapping[str, Any]) -> FitSettings:
    """Return the run's settings; ``told`` is everything that its result depends on."""
    return FitSettings(
        folder=options.out,
        num_steps=num_steps,
        save_every=options.save_every,
        keep=options.keep,
        eval_every=options.eval_every,
        patience=options.patience,
        identity=told,
    )
