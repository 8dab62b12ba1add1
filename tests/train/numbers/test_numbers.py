"""Games that a toy learns from are right, end where they reach their target, and are not those that are asked for."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxinfer.bench.search.numbers import (
    MOST_MOVES,
    MOST_TOKENS,
    distances,
    game,
    is_won,
    moved,
    opening,
    openings,
    vocabulary,
)
from jaxinfer.cli.main import main
from train.command import run_command
from train.data import __main__ as data
from train.model.words import words_tokenizer
from train.numbers import __main__ as numbers
from train.value_head import __main__ as value_head


def test_good_players_win_and_others_sometimes_by_the_rules_of_the_game():
    rng, pairs = np.random.default_rng(0), openings(held_out=False)[::40]
    for skill, least, most in ((1.0, 1.0, 1.0), (0.5, 0.1, 0.7)):
        games = [(start, target, game(start, target, skill, rng).split(" : ")[1]) for start, target in pairs]
        won = [is_won(*each) for each in games]
        assert least <= np.mean(won) <= most
        for (start, target, text), is_good in zip(games, won):
            assert len(text.split()) <= MOST_TOKENS
            assert text.split().count(str(target)) == is_good
            if skill == 1.0:
                assert len(text.split()) == 2 * distances(target)[start] + 1
    assert [is_won(7, 21, text) for text in ("*2 14 +7 21 .", "*2 14 +7 21", "*2 15 +7 22 .", "+7 14 .", ".", "")] == [
        True,
        *[False] * 5,
    ]
    assert not is_won(7, 7, " ".join(["+7 14 -3 11 -3 8"] * 3))
    assert (moved(98, "+7"), moved(2, "-3"), moved(50, "*2"), moved(49, "*2")) == (None, None, None, 98)


def test_what_is_asked_is_never_trained_on_and_words_are_tokens():
    trained, asked = openings(held_out=False), openings(held_out=True)
    assert not set(trained) & set(asked)
    assert len(asked) > 400
    assert all(3 <= distances(target)[start] <= MOST_MOVES for start, target in (*trained[:50], *asked[:50]))
    words = Tokenizer.from_str(words_tokenizer(vocabulary()))
    assert words.encode(" ".join(vocabulary())).ids == list(range(2, 2 + len(vocabulary())))
    assert len(words.encode(opening(*asked[0])).ids) == 4


@pytest.mark.exhaustive
def test_a_toy_its_rollouts_and_its_value_head_are_measured(tmp_path, capsys):
    def run(module, *arguments):
        act = getattr(module, "run", None) or (lambda options: options.run(options))
        return run_command("", "", module.add_arguments, act, list(map(str, arguments)))

    toy, rollouts = tmp_path / "toy", tmp_path / "rollouts.jsonl"
    assert run(numbers, "--out", toy, "--steps", 60, "--prompts", 40) == 0
    made = ("--model", toy / "model", "--prompts", toy / "prompts.jsonl", "--raw", "--samples", 4)
    scorer = ("--scorer", "jaxinfer.bench.search.numbers:won", "--max-new-tokens", 14, "--out", rollouts)
    assert run(data, "rollouts", *made, *scorer) == 0
    lines = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert len(lines) == 160
    # So few steps win no game: one is given a score.
    rollouts.write_text("".join(json.dumps(line | {"score": at % 2}) + "\n" for at, line in enumerate(lines)))
    assert run(value_head, "--model", toy / "model", "--data", rollouts, "--out", toy / "run", "--epochs", 0.5) == 0
    capsys.readouterr()
    asked = ["bench", "search", "--model", str(toy / "model"), "--tasks", "numbers", "--texts", "4", "--actions", "3"]
    assert main([*asked, "--value", str(toy / "run" / "value"), "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    kinds = ("best of n", "one search")
    judged = [f"{kind} by {judge}" for judge in ("checker", "value head", "likelihood") for kind in kinds]
    assert [point["way"] for point in points] == ["greedy", *judged, "short looks by value head"]
    assert main([*asked, "--value", str(toy)]) == 2
