"""``jaxinfer plan``: what fits on TPUs that are not here, and how fast it can be."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.arguments import whole_number
from jaxinfer.errors import InvalidOption

if TYPE_CHECKING:
    from jaxinfer.parallel.mesh import MeshConfig

EXIT_DOES_NOT_FIT = 1
_JSON_FIELDS = """
--json prints one object. All bytes are of one device, all tokens of the whole mesh:
  fits                  whether every program fits; the exit code is 0 then, else 1 (2 for a mistake)
  hbm_total_bytes       the most that a program needs; hbm_capacity_bytes what a device has, missing_bytes the excess
  weights_bytes, cache_bytes, temporaries_bytes
  programs              "prefill", "decode" and with --strategy or --nodes "verify", each one run of it:
    source              "compiler", or "estimate" (the least possible) where it does not fit
    total_bytes, temporaries_bytes            memory
    hbm_bytes, floor_bytes                    what crosses from and to memory, and what must
    flops, collectives {kind: {count, bytes}}, sent_bytes
    hbm_seconds, mxu_seconds, ici_seconds     each alone; roofline_seconds is the longest and bound its name
    tokens, tokens_per_second                 at most
    compile_seconds
  speculation           nodes and depth of the trees, the cost of a step in plain ones, and which share of a chain of
                        drafts must be accepted to gain nothing (null: even all are too few)
  alternatives          if it does not fit: smallest_topology, largest_batch, longest_context that do
  meshes                with --suggest: meshes that fit, the fastest first
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _JSON_FIELDS
    number = whole_number(1)
    parser.add_argument(
        "--model", metavar="M", default="smollm2-135m", help="a built-in name, a folder or a config.json (%(default)s)"
    )
    parser.add_argument("--topology", metavar="T", required=True, help="a chip and a shape: v5e:2x4, v5p:2x2x1, ...")
    parser.add_argument("--tensor", metavar="N", type=number, help="short for --mesh tensor=N")
    parser.add_argument("--mesh", metavar="A=N,A=N", help="lengths of axes: data=2,tensor=4 (default: tensor, all)")
    parser.add_argument("--batch", metavar="N", type=number, default=1, help="rows at a time (%(default)s)")
    parser.add_argument("--max-len", metavar="N", type=whole_number(2), default=2048, help="tokens a row (%(default)s)")
    parser.add_argument("--prompt-tokens", metavar="N", type=number, help="of these in a prompt (512, or fewer)")
    parser.add_argument("--dtype", metavar="D", default="bfloat16", help="of weights and cache (%(default)s)")
    parser.add_argument("--strategy", metavar="S", default="autoregressive", help="plan its step too")
    parser.add_argument("--nodes", metavar="M", type=whole_number(2), default=0, help="plan verifying any M nodes too")
    parser.add_argument("--suggest", action="store_true", help="search for meshes that fit")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the roofline and the memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(options: argparse.Namespace) -> int:
    """Print a plan; return 0 where it fits, else 1."""
    if options.tensor is not None and options.mesh is not None:
        raise InvalidOption("--tensor N is short for --mesh tensor=N: give one of them")
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.bench.plan_chart import check_chart, draw_plan
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
        config=planned_config(options.model),
        topology=options.topology,
        mesh=_mesh(options),
        batch=options.batch,
        max_len=options.max_len,
        prompt_tokens=options.prompt_tokens or min(512, options.max_len),
        dtype=options.dtype,
        strategy_spec=options.strategy,
        nodes=options.nodes,
    )
    if deployment.exceeds_context:
        made_for = deployment.config.longest_text
        _notice(f"max_len {options.max_len} exceeds the {made_for} tokens that the model was made for")
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


def _mesh(options: argparse.Namespace) -> "MeshConfig":
    from jaxinfer.parallel.mesh import MeshConfig, parse_mesh
    from jaxinfer.planning.topology import num_devices

    if options.mesh is not None:
        return parse_mesh(options.mesh)
    return MeshConfig(tensor=options.tensor or num_devices(options.topology))


def _notice(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
