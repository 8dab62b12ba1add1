"""The page to chat on is whole: it is served with the server, and fetches nothing from elsewhere."""

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest

from tests.server.harness import Running

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "jaxinfer" / "server" / "page"


@pytest.mark.parametrize(("path", "name"), [("/", "index.html"), ("/page.css", "page.css"), ("/page.js", "page.js")])
def test_its_files_are_served(server: Running, path: str, name: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 200
    assert answer.content == (PAGE / name).read_bytes()
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith({"/": "text/html", "/page.css": "text/css"}.get(path, "text/java"))


def test_it_names_nothing_that_is_elsewhere() -> None:
    text = "".join(file.read_text() for file in PAGE.iterdir())
    assert not re.findall(r"https?:|//[a-z]|@import|url\(", re.sub(r"(?m)^// .*| // .*", "", text))
    html = (PAGE / "index.html").read_text()
    assert set(re.findall(r'(?:src|href)="([^"]+)"', html)) == {"page.css", "page.js", "data:,"}


def test_its_script_finds_the_elements_that_it_looks_for() -> None:
    html, script = (PAGE / "index.html").read_text(), (PAGE / "page.js").read_text()
    found = set(re.findall(r'find\("(\w+)"\)', script)) | set(
        re.findall(r'"(\w+)"', script.partition("];")[0].partition("SETTINGS")[2])
    )
    assert found - {"message"}
    assert found <= set(re.findall(r'id="(\w+)"', html))


def test_its_colours_are_readable_in_both_schemes() -> None:
    """Text on ground has the contrast that WCAG asks for, 4.5 to 1."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in (PAGE / "page.css").read_text().split("@media", 1)
    )
    for scheme in (light, dark):
        for ink in ("ink", "faint", "error", "draft"):
            assert contrast(scheme[ink], scheme["ground"]) >= 4.5
        assert contrast(scheme["ink"], scheme["user"]) >= 4.5
        assert contrast(scheme["on-action"], scheme["action"]) >= 4.5


def test_it_is_part_of_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["jaxinfer"]
    for file in PAGE.iterdir():
        name = str(file.relative_to(ROOT / "jaxinfer"))
        assert any(fnmatch.fnmatch(name, pattern) for pattern in data), name


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, by WCAG 2."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
