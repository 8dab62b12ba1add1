"""The types of options, and the options that several subcommands share."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidOption
from jaxinfer.grammar.grammar import Grammar

# How weights in few bits are chosen; the first is the default, and reads no text.
METHODS = ("rtn", "gptq", "awq", "awq+gptq", "smoothquant", "sparsegpt", "magnitude")


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argument type: a whole number of at least ``least``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return number

    return parse


def whole_numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return an argument type: whole numbers of at least ``least`` with commas between, each once."""
    number = whole_number(least)

    def parse(text: str) -> tuple[int, ...]:
        numbers = tuple(map(number, text.split(",")))
        if len(set(numbers)) < len(numbers):
            raise argparse.ArgumentTypeError(f"{text!r} names a number twice")
        return numbers

    return parse


def positive_number(text: str) -> float:
    """Parse a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def logit_bias(text: str) -> tuple[int, float]:
    """Parse ``TOKEN_ID=BIAS``."""
    token, _, bias = text.partition("=")
    try:
        pair = int(token), float(bias)
    except ValueError:
        pair = -1, math.nan
    if pair[0] < 0 or math.isnan(pair[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID=BIAS, such as 42=-1.5")
    return pair


def add_model_arguments(parser: argparse.ArgumentParser, dtype: str | None = None, *, has_weights: bool = True) -> None:
    """Add what `jaxinfer.cli.loading.load_model` reads; ``dtype`` is the default, None for the device's own.

    Without ``has_weights`` the command adds ``--weights`` and ``--activations`` of its own.
    """
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="M", help="hub id, folder, .gguf file or .bin file (default: smollm2-135m-instruct)"
    )
    group.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub model")
    shown = f"float32, bfloat16, float16 or float64 (default: {dtype or 'float32 on a CPU, else bfloat16'})"
    group.add_argument("--dtype", metavar="D", default=dtype, help=shown)
    add_layers_argument(group)
    if has_weights:
        add_weights_argument(group)
        add_activations_argument(group)
    add_sparsity_argument(group)
    add_exact_argument(group)
    group.add_argument(
        "--max-len",
        metavar="N",
        type=whole_number(2),
        help="most tokens of prompt and output together (default: the model's context)",
    )
    group.add_argument(
        "--cache",
        metavar="C",
        default="dense",
        help="KV cache: dense (default), paged:page=64, streaming:sinks=4,window=W, which keeps the first 4 and the "
        "last W tokens, retrieval:budget=256,chunk=16,recent=64, of which a query reads some, or crop:keep=N, which "
        "prefills the last N tokens again where learned positions end",
    )
    add_cache_dtype_argument(group)
    add_mesh_argument(group)
    add_collectives_argument(group)


def named_adapter(text: str) -> tuple[str, str]:
    """Parse ``PATH`` or ``NAME=PATH``; a path alone, or a place on the hub, is named as its last folder is."""
    name, _, path = text.partition("=")
    if not path or Path(text).exists():
        is_here = Path(text).exists()
        name, path = Path(text if is_here else text.partition("@")[0]).resolve().name, text
    return name, path


def add_adapter_argument(parser: Any, *, is_many: bool = False) -> None:
    """Add an adapter beside the model, or any number of them."""
    what = "NAME=PATH" if is_many else "PATH"
    more = "; requests take it as their model NAME; may be repeated" if is_many else ""
    action: dict[str, Any] = {"action": "append"} if is_many else {}
    parser.add_argument(
        "--adapter",
        metavar=what,
        type=named_adapter,
        default=[] if is_many else None,
        help="folder of a LoRA adapter that PEFT saved, or OWNER/NAME[/FOLDER][@REVISION] on the hub, used beside the "
        f"model{more}",
        **action,
    )


def add_layers_argument(parser: Any) -> None:
    """Add how many of a model's layers to use."""
    parser.add_argument(
        "--layers",
        metavar="N",
        type=whole_number(1),
        help="the model's first N layers alone, with its final norm and output matrix (default: all)",
    )


def add_cache_dtype_argument(parser: Any) -> None:
    """Add the bits that keys and values are kept in."""
    parser.add_argument(
        "--cache-dtype", metavar="D", help="keep keys and values in 8 bits: int8, or fp8 (default: 16 or 32, as dtype)"
    )


def add_method_arguments(parser: Any) -> None:
    """Add how weights in few bits are chosen."""
    parser.add_argument(
        "--method",
        metavar="M",
        choices=METHODS,
        default=METHODS[0],
        help=f"how int8 and int4 are chosen, and by the last two sparse weights: {', '.join(METHODS)} (default: "
        "%(default)s, each weight to the nearest, or the largest kept)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="text for all but rtn and magnitude (default: the model writes its own)",
    )


def add_weights_argument(parser: Any) -> None:
    """Add the bits that weights are kept in."""
    parser.add_argument(
        "--weights",
        metavar="W",
        help="keep weights in few bits: int8, int8:group=64, fp8, fp8:group=128, int4:group=64, nf4:group=64, mxfp4, "
        "or a GGUF file's own, gguf; or half of them, 2:4 or blocks:kept=1/2",
    )


def add_activations_argument(parser: Any) -> None:
    """Add the bits of what weights in few bits multiply."""
    parser.add_argument(
        "--activations",
        metavar="A",
        help="round what int8 and int4 weights multiply to bytes too: int8 (default: as wide as computed)",
    )


def add_sparsity_argument(parser: Any) -> None:
    """Add which features are left out."""
    parser.add_argument(
        "--sparsity",
        metavar="S",
        help="leave out features of feed-forward layers: exact, those that ReLU makes zero; threshold:T or topk:K, "
        "more of them, which changes the text (default: none)",
    )


def add_exact_argument(parser: Any) -> None:
    """Add what strategies share with plain decoding."""
    parser.add_argument(
        "--exact",
        metavar="E",
        help="what strategies share with plain decoding: bits, or the tokens up to rounding, margin (default: bits on "
        "a CPU, else margin)",
    )


def add_mesh_argument(parser: Any) -> None:
    """Add how a model is split over devices."""
    parser.add_argument(
        "--mesh",
        metavar="M",
        help="split the model over all devices, such as tensor=4 or tensor=4,data=2 (default: one device)",
    )


def add_collectives_argument(parser: Any) -> None:
    """Add what devices send each other."""
    parser.add_argument(
        "--collectives", metavar="C", help="of a mesh that splits sums: send bytes, int8 (default: what is added)"
    )


def add_generation_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Add how far to generate and how, all but the sampling parameters."""
    group = parser.add_argument_group("generation")
    number = whole_number(1)
    group.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=number,
        default=max_new_tokens,
        help="for each prompt (default: %(default)s)",
    )
    group.add_argument(
        "--strategy",
        metavar="S",
        default="autoregressive",
        help="how to decode: NAME or NAME:key=value,... (default: %(default)s)",
    )
    group.add_argument("--stats", action="store_true", help="print counts, times and the speed-up to standard error")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `sampling_options` reads; an option that is not given keeps the default of SamplingParams."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", metavar="T", type=float, help="0 always takes the best token (default: 0)")
    group.add_argument("--top-k", metavar="K", type=int, help="draw from the K best tokens")
    group.add_argument(
        "--top-p", metavar="P", type=float, help="draw from the best tokens that together have probability P"
    )
    group.add_argument(
        "--min-p", metavar="P", type=float, help="draw from tokens at least P times as probable as the best"
    )
    group.add_argument("--seed", metavar="N", type=int, help="the seed decides the text (default: 0)")
    group.add_argument("--stop", metavar="S", action="append", help="stop before this text; may be repeated")
    group.add_argument(
        "--repetition-penalty", metavar="X", type=float, help="above 1: avoid tokens of the prompt and the output"
    )
    group.add_argument("--presence-penalty", metavar="X", type=float, help="above 0: avoid tokens of the output")
    group.add_argument(
        "--frequency-penalty",
        metavar="X",
        type=float,
        help="above 0: avoid tokens of the output, the more the oftener they occur",
    )
    group.add_argument(
        "--logit-bias",
        metavar="ID=X",
        type=logit_bias,
        action="append",
        help="add X to the logit of token ID; may be repeated",
    )
    group.add_argument("--min-new-tokens", metavar="N", type=int, help="draw no stop token before N new tokens")
    group.add_argument(
        "--ignore-eos", action="store_true", default=None, help="ignore stop tokens, and go on to --max-new-tokens"
    )
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="FILE", help="write JSON of the schema in this file")
    grammar.add_argument("--regex", metavar="PATTERN", help="write a text that matches this pattern as a whole")


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
    "ignore_eos",
)


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the user gave, as arguments of SamplingParams."""
    given = {name: getattr(options, name) for name in _SAMPLING} | {"grammar": _grammar(options)}
    return {name: value for name, value in given.items() if value is not None}


def _grammar(options: argparse.Namespace) -> Grammar | None:
    if options.regex is not None:
        return Grammar.regex(options.regex)
    if options.json_schema is None:
        return None
    try:
        return Grammar.json_schema(Path(options.json_schema).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"--json-schema {options.json_schema} cannot be read: {error}") from error
