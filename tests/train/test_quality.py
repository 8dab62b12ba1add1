"""Answers are judged as a reader would judge them, and tasks come with the answers that their data sets give."""

import json

import pytest

from tests.toys import fable
from train import quality
from train.command import run_command
from train.data import __main__ as data

SQL = "table: 1\ncolumns: A, B\nQ: What is A\nA: SELECT A FROM 1"
E2E = "mr,ref\n" + "".join(f'"name[{n}], area[x]",{n} is at x.\n"name[{n}], area[x]",At x is {n}.\n' for n in range(20))


def judge(*arguments):
    return run_command("quality", "", quality.add_arguments, quality.run, list(map(str, arguments)))


def write_task(*arguments):
    command = ["task", *map(str, arguments)]
    return run_command("data", "", data.add_arguments, lambda options: options.run(options), command)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tasks" / "wikisql").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / "tasks" / "wikisql" / f"{split}.jsonl").write_text(json.dumps({"text": SQL}) + "\n")
    (tmp_path / "tasks" / "e2e_dev.csv").write_text(E2E)
    return tmp_path


def test_tasks_are_split_and_keep_all_their_answers(folder, capsys):
    for split in ("train", "test"):
        for kind in ("sql", "table"):
            out = folder / f"{kind}_{split}.jsonl"
            assert write_task("--kind", kind, "--split", split, "--data", folder, "--out", out) == 0
    prompt = "Write the SQL query that answers the question.\ntable: 1\ncolumns: A, B\nQ: What is A"
    assert read(folder / "sql_train.jsonl") == [{"prompt": prompt, "category": "sql", "response": "SELECT A FROM 1"}]
    assert read(folder / "sql_test.jsonl")[0]["references"] == ["SELECT A FROM 1"]
    learned, kept = read(folder / "table_train.jsonl"), read(folder / "table_test.jsonl")
    assert (len(learned), len(kept)) == (36, 2)
    assert kept[0]["references"] == ["18 is at x.", "At x is 18."]
    assert not {one["prompt"] for one in learned} & {one["prompt"] for one in kept}
    capsys.readouterr()
    same = ("--kind", "sql", "--split", "train", "--data", folder)
    assert write_task(*same, "--out", folder / "sql_train.jsonl") == 2
    (folder / "tasks" / "wikisql" / "train.jsonl").write_text('{"text": "no answer"}\n')
    assert write_task(*same, "--out", folder / "new.jsonl") == 2
    errors = capsys.readouterr().err.splitlines()
    assert "exists; give another --out" in errors[0]
    assert "train.jsonl, line 1: the text has no line that begins with 'A: '" in errors[1]


@pytest.mark.slow
def test_the_marks_are_those_of_the_references(trained_folder, tmp_path, capsys):
    """The model's own continuation is right, blanks aside; half of its words are right by halves."""
    lines = fable(3, seed=5).splitlines()
    prompts = [{"prompt": line[:12], "response": "?", "category": "fable"} for line in lines]
    (tmp_path / "first.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    same = ("--model", trained_folder, "--raw", "--max-new-tokens", 20)
    assert judge(*same, "--data", tmp_path / "first.jsonl", "--out", tmp_path / "answers.jsonl") == 0
    assert "overall" in capsys.readouterr().out
    texts = [one["text"] for one in read(tmp_path / "answers.jsonl")]
    half = texts[1].split()[: len(texts[1].split()) // 2]
    references = [["wrong", "  " + texts[0].replace(" ", "\n ")], [" ".join(half)], ["wrong words"]]
    kinds = ("one", "two", "one")
    second = [
        {"prompt": one["prompt"], "references": right, "category": kind}
        for one, right, kind in zip(prompts, references, kinds)
    ]
    (tmp_path / "second.jsonl").write_text("".join(json.dumps(one) + "\n" for one in second))
    assert judge(*same, "--data", tmp_path / "second.jsonl", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    figures = found["categories"]
    assert {name: means["answers"] for name, means in figures.items()} == {"one": 2, "two": 1}
    assert figures["one"]["exact"] == figures["one"]["rougeL"] == 0.5
    assert figures["two"]["exact"] == 0
    recall, precision = 1.0, len(half) / len(texts[1].split())
    assert figures["two"]["rouge1"] == pytest.approx(2 * recall * precision / (recall + precision), abs=0.02)
    assert (found["overall"]["answers"], found["overall"]["tokens_per_step"]) == (3, 1.0)


@pytest.mark.slow
def test_a_strategy_changes_the_steps_and_no_mark(trained_folder, tmp_path, capsys):
    lines = [{"prompt": line[:12], "response": line[12:]} for line in fable(4, seed=5).splitlines()]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    same = ("--model", trained_folder, "--raw", "--max-new-tokens", 30, "--data", tmp_path / "data.jsonl", "--json")
    figures = []
    for strategy in ("autoregressive", "prompt_lookup:min_ngram=1"):
        assert judge(*same, "--strategy", strategy) == 0
        figures.append(json.loads(capsys.readouterr().out)["overall"])
    plain, drafted = figures
    assert drafted.pop("tokens_per_step") > plain.pop("tokens_per_step") == 1.0
    assert drafted == plain


def test_mistakes_end_in_one_line(trained_folder, tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "empty.jsonl").write_text('{"prompt": "a", "references": []}\n')
    (tmp_path / "fine.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    cases = {
        "none.jsonl, line 1: needs 'references'": ("--data", tmp_path / "none.jsonl"),
        "empty.jsonl, line 1: needs 'references'": ("--data", tmp_path / "empty.jsonl"),
        "exists; give another --out": ("--data", tmp_path / "fine.jsonl", "--out", tmp_path / "fine.jsonl"),
        "no such folder": ("--data", tmp_path / "fine.jsonl", "--out", tmp_path / "absent" / "a.jsonl"),
        "no such file": ("--data", tmp_path / "absent.jsonl"),
        "not a file": ("--data", tmp_path),
        "strategy": ("--data", tmp_path / "fine.jsonl", "--raw", "--strategy", "medusaa"),
    }
    for complaint, arguments in cases.items():
        assert judge("--model", trained_folder, *arguments) == 2, complaint
        errors = capsys.readouterr().err
        assert complaint in errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
