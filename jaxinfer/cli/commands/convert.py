"""``jaxinfer convert``: write a model as a folder of our own, its weights in Orbax's format."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.arguments import METHODS, add_layers_argument, add_method_arguments, add_weights_argument
from jaxinfer.cli.output.progress import byte_progress, count_progress
from jaxinfer.cli.prompts import read_calibration
from jaxinfer.errors import InvalidOption

if TYPE_CHECKING:  # --help does not wait for JAX
    from jaxinfer.language_model import LanguageModel

# Of a folder's files that hold no weights.
_MORE_BYTES = 16 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``."""
    parser.add_argument("source", metavar="SRC", help="hub id, folder, .gguf file or llama2.c .bin file")
    parser.add_argument("destination", metavar="DST", help="folder to write; it appears when it is complete")
    parser.add_argument(
        "--dtype",
        metavar="D",
        help="dtype of all tensors (default: as stored; quantised tensors become float32); with --weights, of those "
        "that stay plain numbers (default: float32 on a CPU, else bfloat16)",
    )
    add_layers_argument(parser)
    add_weights_argument(parser)
    add_method_arguments(parser)
    parser.add_argument(
        "--adapter",
        metavar="PATH",
        help="folder of a LoRA adapter that PEFT saved, or OWNER/NAME[/FOLDER][@REVISION] on the hub, to add to the "
        "weights",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if jaxinfer wrote it")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub model")


def run(options: argparse.Namespace) -> int:
    """Convert with a progress bar and say where the folder stands, all on standard error."""
    calibration = read_calibration(options)
    if options.weights is None and options.method != METHODS[0]:
        raise InvalidOption(f"--method {options.method} chooses weights in few bits: give --weights too")
    if options.weights is not None and options.adapter is not None:
        raise InvalidOption("--adapter is added to weights before they are rounded: convert without --weights first")
    # Imported here: --help and mistakes in the options do not wait for JAX.
    from jaxinfer.jax_setup import prepare_jax

    prepare_jax()
    folder = _convert(options) if options.weights is None else _convert_in_few_bits(options, calibration)
    print(f"wrote {folder}", file=sys.stderr)
    return 0


def _convert(options: argparse.Namespace) -> Path:
    from jaxinfer.checkpoint.convert import convert

    with byte_progress(_name(options)) as progress:
        return convert(
            options.source,
            options.destination,
            dtype=options.dtype,
            overwrite=options.overwrite,
            revision=options.revision,
            adapter=options.adapter,
            layers=options.layers,
            notice=_notice,
            progress=progress,
        )


def _convert_in_few_bits(options: argparse.Namespace, calibration: str | None) -> Path:
    """Convert by way of a loaded model; what a method has done outlives an interruption, beside the destination.

    The destination is claimed before the model is loaded: another process that would write there need not work first,
    and what is kept belongs to one process.
    """
    from jaxinfer.checkpoint.convert import check_destination, claimed_destination, keep_source
    from jaxinfer.checkpoint.few_bits import parse_few_bits
    from jaxinfer.model_loading import load
    from jaxinfer.model_quantization import form_of

    target, by_method = check_destination(options.destination, options.overwrite), options.method != METHODS[0]
    keep_source(options.source, target)
    parse_few_bits(options.weights)
    if by_method:
        form_of(options.weights, options.method)
    with claimed_destination(target, options.overwrite):
        with byte_progress(_name(options)) as progress:
            model = load(
                options.source,
                dtype=options.dtype,
                layers=options.layers,
                weights=None if by_method else options.weights,
                revision=options.revision,
                notice=_notice,
                progress=progress,
            )
        kept = target.with_name(f".{target.name}.layers")
        if by_method:
            model = _quantized(model, options, calibration, kept)
            _make_room(kept, model)
        with byte_progress("writing") as progress:
            folder = model.save(target, overwrite=options.overwrite, progress=progress)
        shutil.rmtree(kept, ignore_errors=True)
    return folder


def _quantized(
    model: "LanguageModel", options: argparse.Namespace, calibration: str | None, kept: Path
) -> "LanguageModel":
    from jaxinfer.model_quantization import MAGNITUDE, NUM_TEXTS, TEXTS_TOGETHER, check_quantizable, quantize

    check_quantizable(model, options.weights, options.method, options.source)
    ids = None if calibration is None else model.tokenizer.encode(calibration)
    num_steps = model.config.num_layers + (-(-NUM_TEXTS // TEXTS_TOGETHER) if ids is None else 0)
    with count_progress(f"{options.method} {options.weights}", num_steps) as step_done:
        return quantize(
            model,
            options.weights,
            method=options.method,
            calibration=ids,
            # It takes no longer than rounding.
            kept=None if options.method == MAGNITUDE else kept,
            advance=lambda layer: step_done(f"layer {layer}"),
            wrote=lambda count: step_done(f"{count} texts"),
            notice=_notice,
        )


def _make_room(kept: Path, model: "LanguageModel") -> None:
    """Remove what is kept if a model can be written only where that is: it takes as much room, and is done with."""
    import jax

    # What is written beside the numbers, and whole blocks of the disk, take room too.
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) * 21 // 20 + _MORE_BYTES
    held = sum(path.stat().st_size for path in kept.iterdir()) if kept.is_dir() else 0
    free = shutil.disk_usage(kept.parent).free
    if free < needed <= free + held:
        shutil.rmtree(kept, ignore_errors=True)


def _name(options: argparse.Namespace) -> str:
    return options.source.rstrip("/").rpartition("/")[2]


def _notice(line: str) -> None:
    print(line, file=sys.stderr)
