"""Draws a run's metrics as a PNG file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curves(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the loss, the steps' other figures and the evaluations."""
    # Imported here: it takes a second. No pyplot: it keeps state and looks for a screen.
    from matplotlib.figure import Figure

    steps = [line for line in metrics if "loss" in line]
    evaluations = [(line["step"], line["evaluation"]) for line in metrics if "evaluation" in line]
    figure = Figure(figsize=(14, 4), layout="constrained")
    figure.suptitle(title)
    loss, others, judged = figure.subplots(1, 3)
    loss.plot([line["step"] for line in steps], [line["loss"] for line in steps])
    loss.set_title("loss, nats")
    plain = {"step", "loss", "gradient_norm", "tokens_per_second"}
    for name in sorted({key for line in steps for key in line} - plain):
        others.plot([line["step"] for line in steps], [line[name] for line in steps], label=name)
    others.set_title("by head" if others.lines else "gradient norm")
    if others.lines:
        others.legend()
    else:
        others.plot([line["step"] for line in steps], [line["gradient_norm"] for line in steps])
    judged.plot([step for step, _ in evaluations], [figures["score"] for _, figures in evaluations], marker="o")
    judged.set_title("held-out score")
    for axes in (loss, others, judged):
        axes.set_xlabel("step")
    figure.savefig(path, format="png", dpi=100)
