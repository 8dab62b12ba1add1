"""`jaxinfer bench needle` hides a fact where it says, counts who finds it, and weighs attention rightly."""

import json
import math

import jax
import numpy as np
import pytest

from jaxinfer.bench.needle.haystack import NAMES, haystack
from jaxinfer.bench.needle.mass import attention_mass
from jaxinfer.bench.needle.measure import layouts
from jaxinfer.cli.main import main
from jaxinfer.language_model import LanguageModel
from tests.toys import TINY_LLAMA, float32_backend, random_params


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_fact_stands_where_it_is_said_to_and_the_end_asks_for_it(depth):
    found = haystack(300, lambda sentence: len(sentence.split()), depth, seed=3)
    words = found.prompt.split()
    (name,) = (name for name in NAMES if f"{name}=" == words[-1])
    assert 290 <= len(words) <= 300
    assert abs(words.index(f"{name}={found.answer}.") / len(words) - depth) < 0.05
    assert sum("=" in word for word in words) == 9
    alone = haystack(300, lambda sentence: len(sentence.split()), depth, seed=3, others=0).prompt
    assert sum("=" in word for word in alone.split()) == 2
    assert haystack(300, lambda sentence: len(sentence.split()), depth, seed=3) == found


def test_ways_with_one_budget_read_as_much():
    (_, _, _, everything), (_, _, retrieval, one), (_, _, streaming, other) = layouts([96])
    assert everything is None
    assert one == other == retrieval.budget + retrieval.recent == streaming.sinks + streaming.window == 96


@pytest.mark.slow
def test_the_best_keys_of_even_attention_hold_their_share():
    """Keys of zero make all scores alike; a prompt of more than one chunk."""
    params = random_params(TINY_LLAMA)

    def without_keys(path, leaf):
        return leaf * 0 if "key" in [each.key for each in path] else leaf

    even = jax.tree_util.tree_map_with_path(without_keys, params)
    tokens, share = np.arange(600) % 250, 0.1
    lm, sharp = (LanguageModel(TINY_LLAMA, each, float32_backend()) for each in (even, params))
    expected = np.mean([math.ceil(share * 600) / seen for seen in range(597, 601)])
    np.testing.assert_allclose(attention_mass(lm, tokens.tolist(), share, 4), expected, rtol=1e-5)
    assert all(expected + 0.05 < mass < 1 for mass in attention_mass(sharp, tokens.tolist(), share, 4))


@pytest.mark.exhaustive
def test_the_command_reports_every_cache(tiny_llama_folder, capsys, tmp_path):
    arguments = ["bench", "needle", "--model", str(tiny_llama_folder()), "--lengths", "512", "--budgets", "64,128"]
    assert (
        main(
            [*arguments, "--depths", "2", "--texts", "1", "--others", "0", "--json", "--chart", str(tmp_path / "x.svg")]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert [point["budget"] for point in report["points"]] == [512, 64, 64, 128, 128]
    assert all(point["texts"] == 2 and point["seconds"] > 0 for point in report["points"])
    assert len(report["mass"]) == 2
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_mistakes_are_one_line(capsys, tiny_llama_folder):
    model = ["--model", str(tiny_llama_folder())]
    for arguments, told in (
        (["--budgets", "40"], "--budgets: 40 is not a multiple of 32"),
        (["--budgets", "1024"], "--budgets: 1024 is no less than a text of 1024 tokens"),
        (["--others", "24"], "--others: a text has at most 23 facts that nothing asks for"),
        (["--cache", "paged"], "--cache paged: bench needle compares caches; leave it out"),
        (["--lengths", "1020", *model], "texts of 1020 tokens and 16 more do not fit the context of 1024"),
    ):
        assert main(["bench", "needle", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line.startswith("error: ")
        assert told in line
