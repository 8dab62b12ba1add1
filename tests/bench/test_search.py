"""`jaxinfer bench search` knows right answers from wrong ones, and counts what each way to find them runs."""

import json

import pytest

from jaxinfer.bench.search.tasks import letter_task, run_query, sql_task
from jaxinfer.cli.main import main


def test_a_query_is_right_if_it_returns_the_right_rows():
    problem = next(problem for problem in sql_task().problems if "live in Oslo" in problem.prompt)
    assert problem.prompt.endswith("-- How many people live in Oslo?\nSELECT")
    for text, is_whole, worth in (
        (" COUNT(name) FROM people WHERE city LIKE 'oslo'", True, 1.0),
        (" 3; and more", False, 1.0),
        (" COUNT(*) FROM people;", False, 0.5),
        (" COUNT(*) FROM people", True, 0.5),
        (" COUNT(*) FROM", False, 0.25),
        (" COUNT(*) FROM", True, 0.0),
        (" COUNT(*) FROM towns;", False, 0.0),
    ):
        assert problem.worth(text, is_whole) == worth


def test_every_question_has_rows_of_its_own_and_no_query_runs_for_ever():
    assert all(problem.worth(" name FROM people WHERE 0;", True) == 0.5 for problem in sql_task().problems)
    tables = ", ".join(f"people p{number}" for number in range(12))
    assert run_query(f"SELECT COUNT(*) FROM {tables}") is None


def test_a_story_is_worth_as_much_as_it_keeps_the_letter_out():
    (problem, *_) = letter_task().problems
    assert [problem.worth(text, True) for text in (" a cat", "", "abcE", "e")] == [1, 1, 0.75, 0]


@pytest.mark.exhaustive
def test_the_command_reports_every_way_with_its_tokens(tiny_llama_folder, capsys, tmp_path):
    arguments = ["bench", "search", "--model", str(tiny_llama_folder()), "--tasks", "letter", "--texts", "4"]
    assert main([*arguments, "--actions", "4", "--json", "--chart", str(tmp_path / "x.svg")]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["way"] for point in points] == ["greedy", "best of n", "one search", "4 searches"]
    assert all(point["problems"] == 8 for point in points)
    # A search has plain decoding's text among those that it chooses from.
    assert points[2]["worth"] >= points[0]["worth"]
    assert points[0]["tokens"] < points[1]["tokens"] <= 4 * 16
    assert points[2]["tokens"] <= 4 * 16
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_mistakes_are_one_line(capsys):
    for arguments, told in (
        (["--texts", "6"], "--texts: 6 is not a multiple of 4"),
        (["--tasks", "sql,chess"], "unknown task 'chess'; the tasks are sql, letter, numbers"),
    ):
        assert main(["bench", "search", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert told in line
