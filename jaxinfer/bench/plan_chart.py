"""Draws a plan: the chip's roofline with the programs on it, and a device's memory."""

from pathlib import Path
from typing import Any

from jaxinfer.bench.chart_file import save_chart
from jaxinfer.planning.report import PlanReport
from jaxinfer.planning.roofline import peak_flops
from pallas_kernels.chips import Chip

_GIB = 1 << 30


def draw_plan(model: str, report: PlanReport, chip: Chip, path: Path) -> None:
    """Draw what one device does; `jaxinfer.bench.chart_file.check_chart` has approved of the path."""
    # Imported here: it is optional, and nothing else needs it. No pyplot, which would keep state and look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(f"{model} ({report.dtype}) on {report.topology}, {report.mesh}, batch {report.batch}")
    steps, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_roofline(steps, report, chip)
    _draw_memory(memory, report)
    save_chart(figure, path)


def _draw_roofline(axes: Any, report: PlanReport, chip: Chip) -> None:
    """Draw operations per second over operations per byte. A program that communication limits lies below the roof."""
    peak, bandwidth = peak_flops(chip, report.dtype), chip.device_hbm_bytes_per_second
    ridge = peak / bandwidth
    intensities = {name: program.flops / program.hbm_bytes for name, program in report.programs.items()}
    least, most = min(0.1, *intensities.values()) / 2, max(ridge, *intensities.values()) * 10
    axes.loglog([least, ridge, most], [least * bandwidth, peak, peak], color="black", linewidth=1)
    for name, program in report.programs.items():
        reached = program.flops / program.roofline_seconds
        label = f"{name}: {program.roofline_seconds * 1e3:.3g} ms, {program.bound}"
        axes.plot([intensities[name]], [reached], marker="o", linestyle="none", label=label)
    axes.set_xlabel("operations for each byte of HBM")
    axes.set_ylabel("operations a second, one device")
    axes.set_title("the least time of each program")
    axes.legend()


def _draw_memory(axes: Any, report: PlanReport) -> None:
    parts = {
        "weights": report.weights_bytes,
        "cache": report.cache_bytes,
        "temporaries": report.temporaries_bytes,
    }
    parts["state"] = max(0, report.hbm_total_bytes - sum(parts.values()))
    below = 0.0
    for name, size in parts.items():
        axes.bar(["one device"], [size / _GIB], bottom=below, width=0.5, label=f"{name}: {size / _GIB:.2f} GiB")
        below += size / _GIB
    capacity = report.hbm_capacity_bytes / _GIB
    axes.axhline(capacity, color="black", linewidth=1, label=f"there are {capacity:.2f} GiB")
    axes.set_xlim(-1, 1)
    axes.set_ylabel("GiB")
    axes.set_title("fits" if report.fits else "does not fit")
    axes.legend()
