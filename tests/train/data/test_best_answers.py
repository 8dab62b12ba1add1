"""The answers that are kept are those of the highest scores, by a likelihood or checks that can be computed by hand."""

import json

import numpy as np
import pytest

from tests.toys import BEGIN, encode_bytes, fable
from train.command import run_command
from train.data import __main__ as data
from train.data.best_answers import best_places, checks, likelihood


def best(*arguments):
    words = ["best", *map(str, arguments)]
    return run_command("data", "", data.add_arguments, lambda options: options.run(options), words)


def answer(tokens, reason="stop"):
    return {"prompt_tokens": [BEGIN, 5], "tokens": list(tokens), "finish_reason": reason}


def test_the_best_come_in_their_order_and_of_equals_the_first():
    assert best_places([0.5, 2.0, 0.5, 1.0], 0.5) == [1, 3]
    assert best_places([1.0, 1.0, 1.0], 0.67) == [0, 1]
    assert best_places([3.0, 4.0], 0.1) == [1]


def test_checks_find_texts_that_do_not_end_and_that_go_round_in_circles():
    assert checks(answer([5, 6, 7])) == (True, True)
    assert checks(answer(range(40), "length")) == (False, True)
    assert checks(answer([5, 6] * 20, "length")) == (False, False)
    # A refrain is no circle.
    assert checks(answer([*range(30), *range(12)])) == (True, True)


def test_the_file_of_the_best_holds_their_lines_whole_and_mistakes_end_in_one_line(tmp_path, capsys):
    lines = [answer([5, 6] * 20), answer(range(9)), answer(range(9), "length"), {**answer([7]), "category": "x"}]
    (tmp_path / "all.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    same = ("--data", tmp_path / "all.jsonl", "--by", "checks")
    assert best(*same, "--out", tmp_path / "best.jsonl") == 0
    assert [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()] == [lines[1], lines[3]]
    assert "2 of 4 answers; mean score 1.500 of all, 2.000 of those kept" in capsys.readouterr().err
    (tmp_path / "wrong.jsonl").write_text('{"text": "no answer"}\n')
    for complaint, arguments in {
        "exists; give another --out": (*same, "--out", tmp_path / "best.jsonl"),
        "line 1: needs 'prompt_tokens'": ("--data", tmp_path / "wrong.jsonl", "--out", tmp_path / "new.jsonl"),
        "from 1e-06 to 1": (*same, "--out", tmp_path / "new.jsonl", "--share", 0),
    }.items():
        assert best(*arguments) == 2
        errors = capsys.readouterr().err
        assert complaint in errors
        assert errors.count("\n") == 1


@pytest.mark.slow
def test_the_likelihood_is_of_the_answers_tokens_alone(trained_model):
    text = [BEGIN, *encode_bytes(fable(1, seed=5))]
    logits_TV = np.asarray(trained_model.logits([text]))[0].astype(np.float64)
    logs_TV = logits_TV - np.log(np.sum(np.exp(logits_TV), axis=-1, keepdims=True))
    expected = np.mean([logs_TV[at - 1, text[at]] for at in range(12, len(text))])
    found = likelihood(trained_model, {"prompt_tokens": text[:12], "tokens": text[12:]})
    assert found == pytest.approx(expected, abs=1e-4)
