"""Writes an engine's plan for people."""

from typing import TYPE_CHECKING

from jaxinfer.bench.columns import align
from jaxinfer.cli.output.plan_table import gib, short

if TYPE_CHECKING:
    from jaxinfer.planning.engine_plan import EnginePlan, WindowReport

_TITLES = (
    "rows",
    "bound by",
    "step",
    "at most",
    "a row",
    "HBM moved",
    "of floor",
    "GFLOP",
    "sent",
    "latency",
    "compiled in",
    "collectives",
)


def engine_lines(model: str, plan: "EnginePlan") -> list[str]:
    """Return the lines of an engine's plan: what was planned, what fits, and a step of the rows that do."""
    devices = f"{plan.num_devices} device{'s' if plan.num_devices > 1 else ''}"
    lines = [
        f"an engine of {model} in {plan.dtype} on {plan.topology}, {devices} as {plan.mesh}: texts of {plan.max_len} "
        f"tokens on {plan.pages_per_row} pages of {plan.page_size}",
        *_verdict(plan),
    ]
    if plan.window is None:
        return lines
    lines += ["", *align(_TITLES, [_cells(plan.window)], num_left=0), ""]
    lines += [
        "a device's bytes and operations in one step of rows that are full; at most: tokens a second of all rows, as "
        "plans of batches count them",
        f"pools are {'written where they lie' if plan.window.pools_in_place else 'COPIED by the program'}; pages are "
        + ("read where they lie" if plan.window.pages_in_place else "gathered before they are attended to"),
    ]
    return lines


def _verdict(plan: "EnginePlan") -> list[str]:
    capacity = f"the {gib(plan.hbm_capacity_bytes)} GiB of a device"
    lines = []
    if not plan.fits:
        rows = f"{plan.rows_asked or 1} row" + ("s" if (plan.rows_asked or 1) > 1 else "")
        lines.append(f"does not fit: {rows} need {gib(plan.counted_bytes)} GiB of {capacity}, or more")
    if plan.window is None:
        return [*lines, f"weights {gib(plan.weights_bytes)} GiB, a page {short(plan.page_bytes)}"]
    found = plan.window
    lines.append(
        f"fits: {found.rows} row{'s' if found.rows > 1 else ''}; beside weights {gib(plan.weights_bytes)} and "
        f"temporaries {gib(found.temporaries_bytes)} GiB ({found.temporaries_share:.1%} of the rows' pages), "
        f"{capacity} hold {found.pages} pages of {short(plan.page_bytes)}"
    )
    return lines


def _cells(found: "WindowReport") -> list[str]:
    collectives = [f"{each['count']} {kind} {short(each['bytes'])}" for kind, each in found.collectives.items()]
    return [
        str(found.rows),
        found.bound,
        f"{found.roofline_seconds * 1e3:.3g} ms",
        f"{found.tokens_per_second:,.0f} tok/s",
        f"{found.tokens_per_second_per_row:,.1f} tok/s",
        short(found.hbm_bytes),
        f"{found.hbm_bytes / found.floor_bytes:.2f}x",
        f"{found.flops / 1e9:,.1f}",
        short(found.sent_bytes),
        f"{found.latency_seconds * 1e3:.3g} ms",
        f"{found.compile_seconds:.1f} s",
        ", ".join(collectives) or "none",
    ]
