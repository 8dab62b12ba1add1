"""The dashboard asks for nothing that the server does not count, and its panels stand side by side."""

import fnmatch
import itertools
import json
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.harness import PROMPT, Running

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "jaxinfer" / "server" / "dashboard.json"
# What Prometheus itself adds to every series.
OWN_LABELS = {"instance"}
_NAME = re.compile(r"\bjaxinfer_\w+")


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(FILE.read_text())


@pytest.fixture
def labels(server: Running) -> dict[str, set[str]]:
    """Return the labels of every series that the server has, once it has answered and has refused."""
    assert server.complete(prompt=PROMPT, max_tokens=3).status_code == 200
    assert server.complete(prompt=PROMPT, n=0).status_code == 400
    found: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return dict(found)


def targets(dashboard: Any) -> list[dict[str, str]]:
    return [target for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_that_it_names_exists(dashboard: Any, labels: dict[str, set[str]]) -> None:
    asked = {name for target in targets(dashboard) for name in _NAME.findall(target["expr"])}
    asked |= set(_NAME.findall(json.dumps(dashboard["templating"])))
    assert len(asked) > 20
    assert asked <= set(labels)


def test_every_metric_that_exists_is_shown(dashboard: Any, labels: dict[str, set[str]]) -> None:
    asked = {name for target in targets(dashboard) for name in _NAME.findall(target["expr"])}
    kind = re.compile("_(bucket|sum|count|created|total)$")
    families = {kind.sub("", name) for name in asked}
    hidden = {name for name in labels if name.startswith("jaxinfer_") and kind.sub("", name) not in families}
    assert not hidden


def test_every_label_that_it_groups_by_or_shows_exists(dashboard: Any, labels: dict[str, set[str]]) -> None:
    for target in targets(dashboard):
        known = set().union(*(labels[name] for name in _NAME.findall(target["expr"])), OWN_LABELS)
        grouped = {word for found in re.findall(r"by \(([^)]*)\)", target["expr"]) for word in re.split(r", *", found)}
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert grouped | shown <= known, target
        assert target["expr"].count("(") == target["expr"].count(")")
        assert all('{instance=~"$instance"' in part for part in re.split(r"\bjaxinfer_\w+", target["expr"])[1:])


def test_panels_are_numbered_and_do_not_overlap(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x, y in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23  # Grafana has 24 columns


def test_it_is_part_of_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert any(fnmatch.fnmatch(FILE.name, pattern) for pattern in data["*"])
