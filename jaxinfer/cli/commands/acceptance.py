"""``jaxinfer bench acceptance``: what strategies gain on prompts of the user's own."""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.arguments import (
    add_model_arguments,
    add_sampling_arguments,
    sampling_options,
    whole_number,
    whole_numbers,
)
from jaxinfer.cli.output.progress import count_progress
from jaxinfer.cli.prompts import PromptEntry, read_entries
from jaxinfer.cli.sample_prompts import SAMPLE_PROMPTS
from jaxinfer.errors import InvalidOption

if TYPE_CHECKING:
    from jaxinfer.bench.acceptance.measure import AcceptanceReport

_ALL = "all"
# Those of `jaxinfer.bench.acceptance.chart`, whose import waits for JAX.
_PANELS = ("tokens", "speed", "depth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench acceptance``."""
    parser.add_argument(
        "--strategies",
        metavar="S",
        nargs="+",
        help="what to measure, separated by commas or spaces: NAME or NAME:key=value,...; all for each one that this "
        "model can run without further files; plain decoding always runs",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSONL file; each line has 'prompt' or 'turns', and may have 'category' (default: 5 built-in prompts)",
    )
    parser.add_argument("--per-category", metavar="N", type=whole_number(1), help="take the first N of each category")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    number = whole_number(1)
    parser.add_argument(
        "--batch", metavar="N,N", type=whole_numbers(1), default=(1, 8), help="batch sizes (default: 1,8)"
    )
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=whole_number(2),
        default=128,
        help="for each prompt (default: %(default)s)",
    )
    parser.add_argument("--repeats", metavar="N", type=number, default=3, help="runs; times are medians (default: 3)")
    parser.add_argument(
        "--nodes",
        metavar="N,N",
        type=whole_numbers(1),
        default=(1, 2, 4, 8, 16, 32, 64),
        help="measure the cost of steps with so many nodes, for the predicted speed-up (default: 1,2,4,8,16,32,64)",
    )
    parser.add_argument(
        "--resume",
        metavar="FILE.jsonl",
        type=Path,
        help="keep each group of prompts there as soon as it is measured, and do not measure those that it has",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--chart", metavar="FILE", type=Path, help="draw a chart to a .png or .svg file")
    parser.add_argument(
        "--panels",
        metavar="P,P",
        type=_panels,
        default=_PANELS,
        help=f"what the chart shows (default: {','.join(_PANELS)})",
    )
    parser.add_argument(
        "--from",
        dest="stored",
        metavar="FILE.json",
        type=Path,
        help="measure nothing; show what an earlier --json wrote",
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object; after Ctrl-C, of what is done."""
    if options.chart is None and options.panels != _PANELS:
        raise InvalidOption("--panels says what a chart shows: add --chart FILE.svg, or leave --panels out")
    if options.stored is not None:
        return _show_stored(options)
    if options.strategies is None:
        raise InvalidOption(
            "no strategies were given: add --strategies A,B, or --from FILE.json to show earlier results"
        )
    specs = split_strategies(options.strategies)
    entries = _read(options)
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.acceptance.kept_groups import KeptGroups
    from jaxinfer.bench.acceptance.measure import AcceptanceRun, Sample, Workload, pick, usable_strategies
    from jaxinfer.bench.chart_file import check_chart
    from jaxinfer.cli.loading import load_model
    from jaxinfer.decoding.registry import parse_strategy
    from jaxinfer.model_loading import DEFAULT_MODEL
    from jaxinfer.sampling.params import SamplingParams

    if options.chart is not None:
        check_chart(options.chart)
    sampling = SamplingParams(**sampling_options(options))
    for spec in specs:
        if spec != _ALL:
            parse_strategy(spec)
    model = load_model(options)
    if _ALL in specs:
        usable, refused = usable_strategies(model)
        for name, reason in refused.items():
            print(f"without {name}: {reason}", file=sys.stderr)
        specs = list(dict.fromkeys([*usable, *(spec for spec in specs if spec != _ALL)]))
    samples = []
    for text, category in entries:
        is_chat = options.chat
        ids = model.encode_chat([{"role": "user", "content": text}]) if is_chat else model.tokenizer.encode(text)
        samples.append(Sample(tuple(ids), category))
    sizes = (options.batch, options.max_new_tokens, options.repeats)
    workload = Workload(tuple(specs), *sizes, sampling, options.nodes)
    kept = None
    if options.resume is not None:
        # Batch sizes are those of the groups themselves.
        same = dataclasses.replace(workload, batches=())
        import jax

        device = jax.devices()[0].device_kind, len(jax.devices()), os.cpu_count()
        where = options.cache, str(options.mesh), *device, *map(_files_of, specs)
        kept = KeptGroups(options.resume, f"{model.fingerprint} {model.backend} {same} {where}")
    running = AcceptanceRun(model, pick(samples, options.per_category), workload, kept)
    try:
        with count_progress("acceptance", running.num_runs) as advance:
            running.measure(advance)
    finally:
        report = running.report(DEFAULT_MODEL if options.model is None else options.model)
        if report.complete or any(batch.groups for batch in report.batches):
            _show(report, options)
    return 0


def _files_of(spec: str) -> list[tuple[str, int]]:
    """Return the files that a strategy's options name, or those of a folder, and when they were written."""
    found = []
    for value in re.split(r"[=,+]", spec):
        if value and (path := Path(value)).exists():
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                found.append((str(file), file.stat().st_mtime_ns))
    return found


def _show_stored(options: argparse.Namespace) -> int:
    add_arguments(parser := argparse.ArgumentParser())
    shown = ("kind", "command", "stored", "json", "chart", "panels")
    changed = [name for name in vars(options) if name not in shown and vars(options)[name] != parser.get_default(name)]
    if changed:
        option = f"--{changed[0].replace('_', '-')}"
        raise InvalidOption(f"--from measures nothing, so {option} has no effect: leave one of them out")
    from jaxinfer.bench.acceptance.stored import read_report
    from jaxinfer.bench.chart_file import check_chart

    if options.chart is not None:
        check_chart(options.chart)
    _show(read_report(options.stored), options)
    return 0


def _panels(text: str) -> tuple[str, ...]:
    panels = tuple(text.split(","))
    if len(set(panels)) < len(panels) or not set(panels) <= set(_PANELS):
        raise argparse.ArgumentTypeError(f"{text!r}: name some of {', '.join(_PANELS)}, each once")
    return panels


def split_strategies(words: Sequence[str]) -> list[str]:
    """Cut specifications apart at commas: what begins with ``key=`` is still an option of the one before."""
    specs: list[str] = []
    for word in words:
        for at, piece in enumerate(word.split(",")):
            key, equals, _ = piece.partition("=")
            if at and equals and key.isidentifier() and specs:
                specs[-1] += f",{piece}"
            elif piece:
                specs.append(piece)
    if not specs:
        raise InvalidOption("--strategies names none: give names with commas between, such as prompt_lookup,jacobi")
    return list(dict.fromkeys(specs))


def _read(options: argparse.Namespace) -> list[PromptEntry]:
    if options.prompts is None:
        return [PromptEntry(prompt) for prompt in SAMPLE_PROMPTS]
    return read_entries(options.prompts)


def _show(report: "AcceptanceReport", options: argparse.Namespace) -> None:
    from jaxinfer.bench.acceptance.chart import draw_chart
    from jaxinfer.bench.acceptance.table import acceptance_lines

    if options.json:
        print(json.dumps(dataclasses.asdict(report)), flush=True)
    else:
        print(*acceptance_lines(report), sep="\n", flush=True)
    if options.chart is not None:
        draw_chart(report, options.chart, options.panels)
        print(f"chart: {options.chart}", file=sys.stderr)
