"""``bits``: bits a weight against the number of weights at equal total bits (after 2212.09720).

A family of models of several widths is trained on the same text, so that nothing was rounded before; each is rounded to
every number of bits, and judged on the end of the text.
"""

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.hf_folder import read_json_object
from jaxinfer.errors import InvalidOption
from train.command import number
from train.talks.setup import add_data_argument, data_folder, stored, trained

SUMMARY = "bits a weight against the number of weights at equal total bits"
# Of the text, how much is for training.
_TRAINED = 0.9
_HEAD_DIM, _GROUP = 16, 32
_LEARNING_RATE = 4e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the table."""
    whole = number(int, 1)
    add_data_argument(parser)
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        type=Path,
        help="take config.json and tokenizer from this model (default: DATA/models/stories260K-hf)",
    )
    parser.add_argument("--text", metavar="FILE", type=Path, help="default: DATA/text/tinyshakespeare.txt")
    parser.add_argument(
        "--widths", metavar="W", type=whole, nargs="+", default=[32, 64, 96, 128], help="default: 32 64 96 128"
    )
    parser.add_argument("--layers", metavar="N", type=whole, default=3, help="of each model (default: %(default)s)")
    parser.add_argument(
        "--bits", metavar="N", type=number(int, 2, 8), nargs="+", default=[2, 3, 4, 5, 6, 8], help="default: 2 to 6, 8"
    )
    parser.add_argument("--length", metavar="T", type=whole, default=128, help="of a row (default: %(default)s)")
    parser.add_argument(
        "--epochs",
        metavar="N",
        type=number(float, 0.001),
        default=1.0,
        help="passes over the text (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=number(int, 2), default=8192, help="to judge by (default: %(default)s)"
    )


def build(options: argparse.Namespace) -> dict[str, Any]:
    """Train the family, round it, and return the table."""
    if any(width % _GROUP for width in options.widths):
        raise InvalidOption(f"--widths {' '.join(map(str, options.widths))}: give multiples of {_GROUP}")
    learned, judged = _split_text(options)
    rows = []
    for width in dict.fromkeys(options.widths):
        begun = _describe_model(options, width)
        words: list[object] = ["--init", begun, "--data", learned, "--max-drop", 0, "--exit-scale", 0]
        words += ["--rotate", options.layers, "--length", options.length, "--batch-size", 16]
        words += ["--learning-rate", _LEARNING_RATE, "--epochs", options.epochs, "--held-out", 0.02]
        model = trained(options, f"width_{width}", "model", "train.layerskip", *words)
        words = ["--model", model, "--text", judged, "--tokens", options.tokens, "--context", options.length]
        words += ["--dtype", "float32", "--groups", _GROUP, "--json", "--bits", *sorted(set(options.bits))]
        path = stored(options, f"quality_{width}", "jaxinfer", "bench", "quality", *words)
        rows += rows_of(width, json.loads(path.read_bytes()))
    budgets = best_at_budgets(rows)
    return {"layers": options.layers, "epochs": options.epochs, "group": _GROUP, "rows": rows, "budgets": budgets}


def _split_text(options: argparse.Namespace) -> tuple[Path, Path]:
    """Write the part of the text to learn from, and the part to judge by."""
    source = options.text or data_folder(options) / "text" / "tinyshakespeare.txt"
    text = source.read_text(encoding="utf-8")
    cut = text.find("\n", int(len(text) * _TRAINED)) + 1 or len(text) // 2
    parts = options.work / "learned.txt", options.work / "judged.txt"
    for path, part in zip(parts, (text[:cut], text[cut:])):
        path.write_text(part, encoding="utf-8")
    return parts


def _describe_model(options: argparse.Namespace, width: int) -> Path:
    """Write config.json and tokenizer of a model of the family."""
    like = options.like or data_folder(options) / "models" / "stories260K-hf"
    config = read_json_object(like / "config.json")
    config |= {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": options.layers}
    config |= {"num_attention_heads": width // _HEAD_DIM, "num_key_value_heads": max(1, width // _HEAD_DIM // 2)}
    config |= {"head_dim": _HEAD_DIM}
    folder = options.work / f"begun_{width}_{options.layers}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (like / name).is_file():
            shutil.copyfile(like / name, folder / name)
    return folder


def rows_of(width: int, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a model: 32 bits as it is, and each number of bits with its part of scale and minimum."""
    first, *rounded = report["results"]
    rows = []
    for one in rounded:
        bits = int(one["weights"].partition(" bits")[0]) + 32 / _GROUP
        # What is not rounded takes the same bytes in both.
        weights = round(8 * (first["num_bytes"] - one["num_bytes"]) / (32 - bits))
        rows.append(_row(width, weights, bits, one["perplexity"]))
    return [*rows, _row(width, rows[0]["weights"], 32.0, first["perplexity"])] if rows else []


def _row(width: int, weights: int, bits: float, perplexity: float) -> dict[str, Any]:
    return {"width": width, "weights": weights, "bits": bits, "total_bits": weights * bits, "perplexity": perplexity}


def best_at_budgets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is best within each of six budgets of total bits, from the least to the most that a model takes."""
    totals = sorted({row["total_bits"] for row in rows})
    if not totals:
        return []
    budgets = [totals[0] * (totals[-1] / totals[0]) ** (at / 6) for at in range(1, 7)]
    return [
        {"budget": budget, **min((row for row in rows if row["total_bits"] <= budget * 1.001), key=_by_perplexity)}
        for budget in budgets
    ]


def _by_perplexity(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["perplexity"], row["total_bits"]


def rows(table: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's titles, and its rows."""
    found = [["width", "bits", "weights", "total kbit", "perplexity"]]
    for one in table["rows"]:
        found.append([str(one["width"]), f"{one['bits']:g}", f"{one['weights']:,}", *_cells(one)])
    for one in table["budgets"]:
        found.append([f"best of {one['budget'] / 1e3:,.0f} kbit: {one['width']}", f"{one['bits']:g}", "", *_cells(one)])
    return found


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['total_bits'] / 1e3:,.0f}", f"{row['perplexity']:.3f}"]


def draw(figure: Any, table: Mapping[str, Any]) -> None:
    """Draw perplexity over total bits, a line for each number of bits; those beyond twice the best are left out."""
    axes = figure.subplots()
    most = 2 * min(one["perplexity"] for one in table["rows"])
    for bits in sorted({one["bits"] for one in table["rows"]}):
        own = sorted((one["total_bits"], one["perplexity"]) for one in table["rows"] if one["bits"] == bits)
        shown = [(total, math.nan if value > most else value) for total, value in own]
        axes.plot(*zip(*shown), "o-", label=f"{bits:g}")
    axes.set_xscale("log")
    axes.set_ylim(top=most)
    axes.set_xlabel("bits of all matrices, scales among them")
    axes.set_ylabel("perplexity")
    axes.legend(title="bits a weight")
