"""``jaxinfer plan``: what fits on TPUs that are not here, and how fast it can be."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.arguments import (
    add_activations_argument,
    add_cache_dtype_argument,
    add_collectives_argument,
    add_exact_argument,
    add_layers_argument,
    add_sparsity_argument,
    add_weights_argument,
    positive_number,
    whole_number,
)
from jaxinfer.errors import InvalidOption

if TYPE_CHECKING:
    from jaxinfer.parallel.mesh import MeshConfig

EXIT_DOES_NOT_FIT = 1
_JSON_FIELDS = """
--json prints one object. Bytes are of one device, tokens of the whole mesh:
  fits                  whether every program fits; the exit code is 0 if so, else 1 (2 for a mistake)
  hbm_total_bytes       the most that a program needs
  hbm_capacity_bytes    what a device has; missing_bytes is the difference
  weights_bytes, cache_bytes, temporaries_bytes
  programs              "prefill", "decode" and, with --strategy or --nodes, "verify"; one run of each:
    source              "compiler", or "estimate" (the least possible) if it does not fit
    total_bytes, temporaries_bytes            memory
    hbm_bytes, floor_bytes                    moved from and to memory, and the least possible
    flops, collectives {kind: {count, bytes}}, sent_bytes
    hbm_seconds, mxu_seconds, ici_seconds     each alone, by its bytes or operations
    latency_seconds                           what collectives take besides, however few bytes: an estimate
    roofline_seconds                          the longest of the first three, and the latency
    bound                                     the longest of all four
    tokens, tokens_per_second                 upper bounds
    compile_seconds
  sparsity, live_share  features that steps leave out, and the part of their blocks that is taken to be live
  step_rows             nodes that every step is filled up to (--exact bits), else 1
  speculation           nodes and depth of the trees, cost of a step over a plain step, and the acceptance rate of a
                        chain from which it gains (null: it never does)
  drafting              of strategies that adapt (auto), at a batch of 1, 8 and 64: costs, plain steps that a step of so
                        many nodes takes by what is counted, and the nodes that it would verify on texts on which a
                        step gives tokens_per_step (null: the batch does not fit)
  alternatives          if it does not fit: the smallest_topology, largest_batch and longest_context that fit
  meshes                with --suggest: meshes that fit, the fastest first

With --engine, bytes of one device:
  fits                  whether the rows asked for fit, or one; the exit code is as above
  hbm_capacity_bytes, weights_bytes, page_bytes, pages_per_row
  counted_bytes         weights and pages of the rows asked for, or of one
  window                of the rows asked for, or the most that fit (null: none):
    rows, pages                               pages: how many fit beside weights and temporaries
    pool_bytes, total_bytes, temporaries_bytes, temporaries_share
    pools_in_place, pages_in_place            whether pools are written, and pages read, where they lie
    hbm_bytes, floor_bytes                    of a step, and its weights and the pages that it sees
    tokens_per_second, tokens_per_second_per_row
    and the others of a program
"""
# What plans of batches are told, and an engine's is not.
_OF_BATCHES = (
    "batch",
    "collectives",
    "prompt_tokens",
    "exact",
    "sparsity",
    "live_share",
    "strategy",
    "nodes",
    "suggest",
    "plot",
)
_OF_ENGINES = ("rows", "page_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _JSON_FIELDS
    number = whole_number(1)
    parser.add_argument(
        "--model",
        metavar="M",
        default="smollm2-135m",
        help="built-in name, folder or config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--topology", metavar="T", required=True, help="chip and shape of the slice, such as v5e:2x4 or v5p:2x2x1"
    )
    parser.add_argument("--tensor", metavar="N", type=number, help="same as --mesh tensor=N")
    parser.add_argument(
        "--mesh",
        metavar="A=N,A=N",
        help="how to split the model, such as data=2,tensor=4 (default: tensor over all devices)",
    )
    parser.add_argument("--batch", metavar="N", type=number, help="sequences at a time (default: 1)")
    parser.add_argument(
        "--max-len",
        metavar="N",
        type=whole_number(2),
        default=2048,
        help="slots of each sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens", metavar="N", type=number, help="length of a prompt (default: 512, or --max-len if less)"
    )
    parser.add_argument(
        "--dtype", metavar="D", default="bfloat16", help="of weights and KV cache (default: %(default)s)"
    )
    add_layers_argument(parser)
    add_weights_argument(parser)
    add_activations_argument(parser)
    add_cache_dtype_argument(parser)
    add_collectives_argument(parser)
    add_exact_argument(parser)
    add_sparsity_argument(parser)
    parser.add_argument(
        "--live-share",
        metavar="P",
        type=positive_number,
        help="with --sparsity: the part of the blocks of 128 features that is live in a step, of all its rows, as "
        "jaxinfer bench sparsity counts them (default: 1, the most that a step reads)",
    )
    parser.add_argument("--strategy", metavar="S", help="plan the verification step of this strategy too")
    parser.add_argument("--nodes", metavar="M", type=whole_number(2), help="plan the verification of any M nodes too")
    parser.add_argument("--suggest", action="store_true", help="search for meshes that fit, the fastest first")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw the roofline and the memory to a .png or .svg file"
    )
    parser.add_argument(
        "--engine", action="store_true", help="plan an engine instead: the rows and pages that fit, and its decoding"
    )
    parser.add_argument(
        "--rows", metavar="N", type=number, help="texts that an engine decodes together (default: as many as fit)"
    )
    parser.add_argument("--page-size", metavar="N", type=number, help="slots of an engine's page (default: 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    """Print a plan; return 0 where it fits, else 1."""
    if options.tensor is not None and options.mesh is not None:
        raise InvalidOption("--tensor N and --mesh say the same thing: give one of them")
    _check_kind(options)
    if options.engine:
        return _plan_engine(options)
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.chart_file import check_chart
    from jaxinfer.bench.plan_chart import draw_plan
    from jaxinfer.cli.output.plan_table import candidate_lines, plan_lines
    from jaxinfer.jax_setup import prepare_jax
    from jaxinfer.planning.deployment import Deployment
    from jaxinfer.planning.known_models import planned_config
    from jaxinfer.planning.report import make_plan
    from jaxinfer.planning.suggest import find_alternatives, suggest_meshes

    if options.plot is not None:
        check_chart(options.plot, "--plot")
    prepare_jax()
    deployment = Deployment(
        config=planned_config(options.model, options.layers),
        topology=options.topology,
        mesh=_mesh(options),
        batch=options.batch or 1,
        max_len=options.max_len,
        prompt_tokens=options.prompt_tokens or min(512, options.max_len),
        dtype=options.dtype,
        weights=options.weights,
        activations=options.activations,
        cache_dtype=options.cache_dtype,
        collectives=options.collectives,
        exact=options.exact,
        sparsity=options.sparsity,
        live_share=1.0 if options.live_share is None else options.live_share,
        strategy_spec=options.strategy or "autoregressive",
        nodes=options.nodes or 0,
    )
    _warn_of_length(deployment.config.longest_text, options.max_len)
    report = make_plan(deployment, _notice)
    alternatives = None if report.fits else find_alternatives(deployment, report, _notice)
    meshes = suggest_meshes(deployment, report, notice=_notice) if options.suggest else None
    if options.json:
        found = {"model": options.model, **dataclasses.asdict(report)}
        found["alternatives"] = None if alternatives is None else dataclasses.asdict(alternatives)
        found["meshes"] = None if meshes is None else [dataclasses.asdict(mesh) for mesh in meshes]
        print(json.dumps(found))
    else:
        print(*plan_lines(options.model, report), *candidate_lines(alternatives, meshes), sep="\n")
    if options.plot is not None:
        draw_plan(options.model, report, deployment.chip, options.plot)
        _notice(f"plot: {options.plot}")
    return 0 if report.fits else EXIT_DOES_NOT_FIT


def _check_kind(options: argparse.Namespace) -> None:
    """Raise InvalidOption for an option of the other kind of plan."""
    others = _OF_BATCHES if options.engine else _OF_ENGINES
    given = next((name for name in others if getattr(options, name)), None)
    if given is not None:
        option = "--" + given.replace("_", "-")
        raise InvalidOption(f"{option} {'is not of' if options.engine else 'is of'} an engine's plan (--engine)")


def _plan_engine(options: argparse.Namespace) -> int:
    from jaxinfer.cli.output.engine_table import engine_lines
    from jaxinfer.engine.config import engine_config
    from jaxinfer.jax_setup import prepare_jax
    from jaxinfer.planning.engine_plan import plan_engine
    from jaxinfer.planning.engine_window import EngineDeployment
    from jaxinfer.planning.known_models import planned_config

    prepare_jax()
    own: dict[str, Any] = {} if options.page_size is None else {"page_size": options.page_size}
    deployment = EngineDeployment(
        config=planned_config(options.model, options.layers),
        topology=options.topology,
        mesh=_mesh(options),
        max_len=options.max_len,
        rows=options.rows,
        dtype=options.dtype,
        weights=options.weights,
        activations=options.activations,
        cache_dtype=options.cache_dtype,
        engine=engine_config(own),
    )
    _warn_of_length(deployment.config.longest_text, options.max_len)
    plan = plan_engine(deployment, _notice)
    if options.json:
        print(json.dumps({"model": options.model, **dataclasses.asdict(plan)}))
    else:
        print(*engine_lines(options.model, plan), sep="\n")
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _warn_of_length(longest: int | None, max_len: int) -> None:
    if longest is not None and max_len > longest:
        _notice(f"max_len {max_len} exceeds the {longest} tokens that the model was made for")


def _mesh(options: argparse.Namespace) -> "MeshConfig":
    from jaxinfer.parallel.mesh import MeshConfig, parse_mesh
    from jaxinfer.planning.topology import num_devices

    if options.mesh is not None:
        return parse_mesh(options.mesh)
    return MeshConfig(tensor=options.tensor or num_devices(options.topology))


def _notice(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
