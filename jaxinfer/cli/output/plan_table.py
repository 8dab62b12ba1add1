"""Writes a plan for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxinfer.bench.columns import align

if TYPE_CHECKING:
    from jaxinfer.planning.drafting import Drafting
    from jaxinfer.planning.report import PlanReport, ProgramReport, Speculation
    from jaxinfer.planning.suggest import Alternatives, Candidate

_GIB = 1 << 30
_TITLES = (
    "program",
    "bound by",
    "roofline",
    "at most",
    "HBM moved",
    "of floor",
    "GFLOP",
    "sent",
    "latency",
    "memory",
    "compiled in",
    "collectives",
)


def plan_lines(model: str, report: "PlanReport") -> list[str]:
    """Return the lines of a plan: what was planned, the verdict, a table of programs, what speculation must gain."""
    devices = f"{report.num_devices} device{'s' if report.num_devices > 1 else ''}"
    dtype = report.dtype if report.weights is None else f"{report.dtype}, weights in {report.weights},"
    dtype += "" if report.activations is None else f" activations in {report.activations},"
    if report.sparsity is not None:
        dtype += f", sparsity {report.sparsity} with {report.live_share:.0%} of blocks live in a step,"
    lines = [
        f"{model} in {dtype} on {report.topology}, {devices} as {report.mesh}: batch {report.batch}, "
        f"{report.max_len} tokens a row, prompts of {report.prompt_tokens}"
        + (f"; every step filled up to {report.step_rows} nodes" if report.step_rows > 1 else ""),
        _verdict(report),
        "",
        *align(_TITLES, [_cells(name, program) for name, program in report.programs.items()], num_left=2),
        "",
        "a device's bytes and operations in one run; at most: tokens a second of all devices, were nothing but what "
        "binds to take time, and the latency of collectives: an estimate by the links that they cross",
    ]
    if any(program.bubble for program in report.programs.values()):
        idle = ", ".join(f"{program.bubble:.0%} of {name}" for name, program in report.programs.items())
        lines.append(f"a stage of the pipeline idles for {idle}, which its bytes and operations count as if it did not")
    if any(program.source == "estimate" for program in report.programs.values()):
        lines.append("*: not compiled, since it does not fit; what it must move and compute at least")
    if report.speculation is not None:
        lines.append(_speculation_line(report.strategy, report.speculation))
    if report.drafting is not None:
        lines += drafting_lines(report.strategy, report.drafting)
    return lines


def candidate_lines(alternatives: "Alternatives | None", meshes: "list[Candidate] | None") -> list[str]:
    """Return what fits instead, and the meshes that were found."""
    lines = []
    if alternatives is not None:
        lines += ["", "what fits instead, by compiling it:"]
        for title, found in (
            ("smallest slice", alternatives.smallest_topology),
            ("largest batch", alternatives.largest_batch),
            ("longest context", alternatives.longest_context),
        ):
            lines.append(f"  {title}: {'none' if found is None else _described(found)}")
    if meshes is not None:
        lines += ["", "meshes that fit, the fastest first:" if meshes else "no mesh of these devices fits"]
        lines += [f"  {_described(found)}" for found in meshes]
    return lines


def _verdict(report: "PlanReport") -> str:
    needed, capacity = gib(report.hbm_total_bytes), gib(report.hbm_capacity_bytes)
    parts = (
        f"weights {gib(report.weights_bytes)}, cache {gib(report.cache_bytes)}, "
        f"temporaries {gib(report.temporaries_bytes)}"
    )
    if report.fits:
        share = report.hbm_total_bytes / report.hbm_capacity_bytes
        return f"fits: {needed} of {capacity} GiB a device ({share:.0%}): {parts}"
    missing = gib(report.missing_bytes)
    return f"does not fit: {needed} GiB a device, {missing} more than the {capacity} there are: {parts}"


def _cells(name: str, program: "ProgramReport") -> list[str]:
    collectives = [f"{found['count']} {kind} {short(found['bytes'])}" for kind, found in program.collectives.items()]
    mark = "" if program.source == "compiler" else "*"
    return [
        name + mark,
        program.bound,
        f"{program.roofline_seconds * 1e3:.3g} ms",
        f"{program.tokens_per_second:,.0f} tok/s",
        short(program.hbm_bytes),
        f"{program.hbm_bytes / program.floor_bytes:.2f}x",
        f"{program.flops / 1e9:,.1f}",
        short(program.sent_bytes),
        f"{program.latency_seconds * 1e3:.3g} ms",
        f"{gib(program.total_bytes)} GiB",
        "-" if program.compile_seconds is None else f"{program.compile_seconds:.1f} s",
        ", ".join(collectives) or "none",
    ]


def _speculation_line(strategy: str, found: "Speculation") -> str:
    line = f"{strategy}: a step of {found.nodes} nodes takes {found.cost:.2f} plain steps, so it gains from "
    if found.acceptance is None:
        return f"{line}{found.cost:.2f} tokens a step on, more than its {found.depth} drafts can give"
    accepted = f"{found.acceptance:.0%} of the drafts of a chain of {found.depth} accepted"
    return f"{line}{max(found.cost, 1.0):.2f} tokens a step on ({accepted})"


def drafting_lines(strategy: str, found: Sequence["Drafting"]) -> list[str]:
    """Return what a strategy that adapts would do, a line for each batch."""
    lines = [f"{strategy}, by counted costs; N nodes gain from so many tokens a step on:"]
    for one in found:
        if one.nodes is None:
            lines.append(f"  batch {one.batch}: does not fit, or does not split over the devices")
            continue
        costs = ", ".join(f"{nodes}: {max(cost, 1.0):.2f}" for nodes, cost in one.costs.items() if nodes > 1)
        chosen = "drafts nothing" if one.nodes == 1 else f"verifies {one.nodes} nodes"
        given = "" if one.nodes == 1 else f", {one.tokens_per_step:.2f} tokens a step"
        lines.append(f"  batch {one.batch}: {costs}; on texts as of Spec-Bench it {chosen}{given}")
    return lines


def _described(found: "Candidate") -> str:
    return (
        f"{found.topology} as {found.mesh}, batch {found.batch}, {found.max_len} tokens a row: "
        f"{gib(found.hbm_total_bytes)} GiB a device, at most {found.tokens_per_second:,.0f} tok/s"
    )


def gib(size: int) -> str:
    """Return bytes in GiB."""
    return f"{size / _GIB:.2f}"


def short(size: int) -> str:
    """Return bytes in the largest decimal unit of which there is one."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"
