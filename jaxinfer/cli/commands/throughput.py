"""``jaxinfer bench throughput``: requests that come and go, beside static batches of the same, or without drafts."""

import argparse
import dataclasses
import json
import math
from pathlib import Path

from jaxinfer.cli.arguments import (
    add_model_arguments,
    add_sampling_arguments,
    positive_number,
    sampling_options,
    whole_number,
    whole_numbers,
)
from jaxinfer.cli.output.progress import count_progress
from jaxinfer.cli.prompts import read_entries
from jaxinfer.cli.sample_prompts import SAMPLE_PROMPTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench throughput``."""
    parser.add_argument("--strategy", metavar="S", default="autoregressive", help="of every request (default: plain)")
    parser.add_argument(
        "--prompts", metavar="FILE", help="JSONL file; each line has 'prompt' or 'turns' (default: 5 built-in prompts)"
    )
    parser.add_argument("--requests", metavar="N", type=whole_number(1), help="take the first N prompts")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument(
        "--at-once",
        metavar="N,N",
        type=whole_numbers(1),
        default=(1, 2, 4, 8),
        help="clients that send one request after another, and rows of static batches (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--rate",
        metavar="R",
        type=positive_number,
        action="append",
        default=[],
        help="also requests that arrive at random, R a second; may be repeated",
    )
    for name, least, default, text in (
        ("--max-new-tokens", 2, 128, "for each request"),
        ("--repeats", 1, 3, "runs of each load; the report has medians"),
    ):
        parser.add_argument(
            name, metavar="N", type=whole_number(least), default=default, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--spread",
        metavar="S,S",
        type=_spreads,
        default=(),
        help="also draw the length of each text: standard deviations, as parts of the mean, which is --max-new-tokens",
    )
    parser.add_argument(
        "--against",
        choices=("static", "undrafted"),
        default="static",
        help="what clients are compared with: static batches (default), or the same engine without drafts",
    )
    parser.add_argument("--chart", metavar="FILE", type=Path, help="draw a chart to a .png or .svg file")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object."""
    entries = read_entries(options.prompts) if options.prompts else [(text, "") for text in SAMPLE_PROMPTS]
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.chart_file import check_chart
    from jaxinfer.bench.throughput.chart import draw_throughput
    from jaxinfer.bench.throughput.measure import Workload, measure_throughput, num_runs
    from jaxinfer.bench.throughput.table import throughput_lines
    from jaxinfer.cli.loading import load_model
    from jaxinfer.decoding.registry import parse_strategy
    from jaxinfer.model_loading import DEFAULT_MODEL
    from jaxinfer.sampling.params import SamplingParams

    parse_strategy(options.strategy)
    if options.chart is not None:
        check_chart(options.chart)
    rates = tuple(options.rate)
    sampling = SamplingParams(**sampling_options(options))
    asked = options.at_once, rates, options.max_new_tokens, options.repeats
    work = Workload(options.strategy, *asked, sampling, options.spread, options.against)
    model = load_model(options)
    prompts = []
    for text, *_ in entries[: options.requests]:
        is_chat = options.chat
        prompts.append(
            model.encode_chat([{"role": "user", "content": text}]) if is_chat else model.tokenizer.encode(text)
        )
    with count_progress("throughput", num_runs(work)) as advance:
        report = measure_throughput(
            DEFAULT_MODEL if options.model is None else options.model,
            model,
            prompts,
            work,
            {"max_rows": max((*options.at_once, 16 if rates else 1))},
            advance,
        )
    if options.chart is not None:
        draw_throughput(report, options.chart)
    if options.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        print(*throughput_lines(report), sep="\n")
    return 0


def _spreads(text: str) -> tuple[float, ...]:
    """Parse different numbers from 0 on, with commas between."""
    try:
        spreads = tuple(map(float, text.split(",")))
    except ValueError:
        spreads = (-1.0,)
    if not all(0 <= spread < math.inf for spread in spreads) or len(set(spreads)) < len(spreads):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different numbers from 0 on")
    return spreads
