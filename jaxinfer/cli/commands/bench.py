"""``jaxinfer bench``: measure speed and quality."""

import argparse
import dataclasses
import json
import sys

from jaxinfer.cli.arguments import (
    add_activations_argument,
    add_cache_dtype_argument,
    add_exact_argument,
    add_layers_argument,
    add_mesh_argument,
    add_weights_argument,
    whole_number,
)
from jaxinfer.cli.commands import acceptance, needle, quality, search, sparsity, throughput
from jaxinfer.cli.output.progress import byte_progress
from jaxinfer.errors import InvalidOption


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench`` and of what it measures."""
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    latency = kinds.add_parser("latency", help="prefill and decode throughput, time to first token")
    latency.add_argument(
        "--model", metavar="M", help="hub id, folder, .gguf file or .bin file (default: smollm2-135m-instruct)"
    )
    latency.add_argument(
        "--dtype", metavar="D", default="float32", help="one or several, separated by commas (default: %(default)s)"
    )
    for name, least, default, text in (
        ("--prompt-tokens", 1, 512, "length of each prompt"),
        ("--new-tokens", 2, 128, "tokens to generate for each prompt"),
        ("--batch", 1, 1, "prompts at a time"),
        ("--repeats", 1, 3, "measurements; the report has medians"),
    ):
        latency.add_argument(
            name, metavar="N", type=whole_number(least), default=default, help=f"{text} (default: %(default)s)"
        )
    add_layers_argument(latency)
    add_weights_argument(latency)
    add_activations_argument(latency)
    add_cache_dtype_argument(latency)
    add_exact_argument(latency)
    add_mesh_argument(latency)
    latency.add_argument(
        "--compare", metavar="RIVAL", choices=["transformers"], help="transformers: measure it in the same run"
    )
    latency.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    acceptance.add_arguments(
        kinds.add_parser("acceptance", help="tokens per step, acceptance rate and speed-up of strategies")
    )
    throughput.add_arguments(
        kinds.add_parser("throughput", help="requests served at a time, beside static batches of the same requests")
    )
    quality.add_arguments(
        kinds.add_parser("quality", help="perplexity, agreement and exact answers, with weights in fewer bits")
    )
    sparsity.add_arguments(
        kinds.add_parser("sparsity", help="features that are zero, weights that are not read, speed by batch and tree")
    )
    search.add_arguments(
        kinds.add_parser("search", help="right answers by compute: tree search, best of n samples, plain decoding")
    )
    needle.add_arguments(
        kinds.add_parser("needle", help="facts found in long texts, by cache and by the tokens that a query reads")
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print a table, or one JSON object."""
    others = {
        "acceptance": acceptance,
        "throughput": throughput,
        "quality": quality,
        "sparsity": sparsity,
        "search": search,
        "needle": needle,
    }
    return others[options.kind].run(options) if options.kind in others else _run_latency(options)


def _run_latency(options: argparse.Namespace) -> int:
    dtypes = tuple(filter(None, (name.strip() for name in options.dtype.split(","))))
    if not dtypes or len(set(dtypes)) < len(dtypes):
        raise InvalidOption(f"--dtype {options.dtype!r}: name each dtype once, with commas between")
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.latency.measure import Workload, measure_latency
    from jaxinfer.bench.latency.table import latency_lines
    from jaxinfer.jax_setup import prepare_jax
    from jaxinfer.model_loading import DEFAULT_MODEL
    from jaxinfer.planning.topology import without_persistent_cache

    prepare_jax()
    model = DEFAULT_MODEL if options.model is None else options.model
    workload = Workload(options.prompt_tokens, options.new_tokens, options.batch, options.repeats)
    with byte_progress(model) as progress, without_persistent_cache():
        report = measure_latency(
            model,
            dtypes,
            workload,
            rival=options.compare,
            layers=options.layers,
            weights=options.weights,
            activations=options.activations,
            cache_dtype=options.cache_dtype,
            mesh=options.mesh,
            exact=options.exact,
            notice=lambda line: print(line, file=sys.stderr),
            progress=progress,
        )
    if options.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        print(*latency_lines(report), sep="\n")
    return 0
