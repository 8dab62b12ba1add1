"""Draws a measurement of acceptance; needs matplotlib, which is optional."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxinfer.bench.acceptance.measure import BASELINE, AcceptanceReport, BatchReport, StrategyReport
from jaxinfer.bench.acceptance.tally import Tally
from jaxinfer.bench.chart_file import save_chart

# What a chart shows of each batch size, and how wide that is.
PANELS: Mapping[str, int] = MappingProxyType({"tokens": 8, "speed": 6, "depth": 6})
# Of more strategies than bars can show beside each other, tables with colours show tokens and speed by category.
MOST_BARS = 4
_CELL, _NAMES, _LINE = 0.55, 2.6, 0.34


def draw_chart(report: AcceptanceReport, path: Path, panels: Sequence[str] = tuple(PANELS)) -> None:
    """Draw for each batch size tokens per step by category, net speed-up and acceptance by depth, or some of these.

    `jaxinfer.bench.chart_file.check_chart` has approved of the path.
    """
    # Imported here: it is optional, and nothing else needs it. No pyplot, which would keep state and look for a screen.
    from matplotlib.figure import Figure

    batches = [batch for batch in report.batches if batch.groups]
    most = max([len(_sped_up(batch)) for batch in batches], default=0)
    columns = 1 + max([len(one.categories) for batch in batches for one in _sped_up(batch)], default=0)
    widths, height, drawers = [float(PANELS[panel]) for panel in panels], 4.0, _DRAWERS
    if most > MOST_BARS:
        drawers = MappingProxyType({**_DRAWERS, "tokens": _map_tokens, "speed": _map_speed})
        height = max(height, 1.5 + _LINE * most)
        widths = [width if panel == "depth" else _NAMES + _CELL * columns for panel, width in zip(panels, widths)]
    figure = Figure(figsize=(max(10, sum(widths)), 1 + height * max(1, len(batches))), layout="constrained")
    figure.suptitle(
        f"{report.model} ({report.dtype}) on {report.device} ({report.cores} cores), "
        f"{report.max_new_tokens} new tokens, temperature {report.temperature:g}"
    )
    axes = figure.subplots(max(1, len(batches)), len(panels), squeeze=False, width_ratios=widths)
    for row, batch in zip(axes, batches):
        for one, panel in zip(row, panels):
            drawers[panel](one, batch)
    save_chart(figure, path)


def _draw_tokens(axes: Any, batch: BatchReport) -> None:
    shown = _sped_up(batch)
    categories = list(shown[0].categories) if shown else []

    def tally(one: StrategyReport, place: int) -> Tally:
        return one.categories[categories[place - 1]] if place else one.overall

    width = 0.8 / max(1, len(shown))
    for number, one in enumerate(shown):
        places = [place + (number - (len(shown) - 1) / 2) * width for place in range(len(categories) + 1)]
        heights = [tally(one, place).tokens_per_step for place in range(len(categories) + 1)]
        axes.bar(places, heights, width, label=one.strategy)
    axes.axhline(1.0, color="black", linewidth=1, label="plain decoding")
    axes.set_xticks(range(len(categories) + 1), ["all", *categories], rotation=30, ha="right")
    axes.set_ylabel("tokens per step")
    axes.set_title(f"batch {batch.batch}: tokens per step")
    axes.legend()


def _draw_speed(axes: Any, batch: BatchReport) -> None:
    shown = _sped_up(batch)
    places = range(len(shown))
    width = 0.4
    for offset, label, values in (
        (-width / 2, "measured", [one.overall.speed_up for one in shown]),
        (width / 2, "predicted by the cost model", [one.overall.predicted_speed_up for one in shown]),
    ):
        axes.bar([place + offset for place in places], [value or 0.0 for value in values], width, label=label)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(list(places), [one.strategy.replace(":", ":\n").replace(",", ",\n") for one in shown])
    axes.set_ylabel("times plain decoding")
    axes.set_title(f"batch {batch.batch}: net speed-up")
    axes.legend()


def _map_tokens(axes: Any, batch: BatchReport) -> None:
    _draw_map(axes, batch, lambda tally: tally.tokens_per_step, "tokens per step")


def _map_speed(axes: Any, batch: BatchReport) -> None:
    _draw_map(axes, batch, lambda tally: tally.speed_up, "net speed-up, times plain decoding")


def _draw_map(axes: Any, batch: BatchReport, value_of: Callable[[Tally], float | None], title: str) -> None:
    """Draw a table of strategies by category, most tokens a step first; green is above plain decoding, red below."""
    from matplotlib.colors import TwoSlopeNorm

    shown = sorted(_sped_up(batch), key=lambda one: -one.overall.tokens_per_step)
    categories = list(shown[0].categories)
    found = [[value_of(tally) for tally in (one.overall, *one.categories.values())] for one in shown]
    # A part of a larger batch has no time of its own, and no colour.
    colours = [[float("nan") if number is None else number for number in row] for row in found]
    axes.imshow(colours, cmap="RdYlGn", norm=TwoSlopeNorm(1.0, 0.0, 3.0), aspect="auto")
    best = [max((row[column] or 0.0 for row in found), default=0.0) for column in range(len(categories) + 1)]
    for place, row in enumerate(found):
        for column, number in enumerate(row):
            text, weight = "-" if number is None else f"{number:.2f}", "bold" if number == best[column] else "normal"
            axes.text(column, place, text, ha="center", va="center", fontsize=8, weight=weight)
    axes.set_xticks(range(len(categories) + 1), ["all", *categories], rotation=40, ha="right")
    axes.set_yticks(range(len(shown)), [one.strategy.replace(":", ":\n", 1) for one in shown], fontsize=8)
    axes.axvline(0.5, color="black", linewidth=1)
    axes.set_title(f"batch {batch.batch}: {title}")


def _draw_depths(axes: Any, batch: BatchReport) -> None:
    for one in batch.strategies:
        shares = one.overall.acceptance_by_depth
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=one.strategy)
    axes.set_xlabel("depth of the draft")
    axes.set_ylabel("share of steps that accepted it")
    axes.set_ylim(0, 1)
    axes.set_title(f"batch {batch.batch}: acceptance by depth")
    if axes.lines:
        axes.legend()


def _sped_up(batch: BatchReport) -> list[StrategyReport]:
    return [one for one in batch.strategies if one.strategy != BASELINE]


_DRAWERS = MappingProxyType({"tokens": _draw_tokens, "speed": _draw_speed, "depth": _draw_depths})
