"""Prompts of everyday tasks, from files as their data sets publish them."""

import json

import numpy as np
import pytest

from train import prompts
from train.command import run_command
from train.data import public_tasks
from train.data.public_tasks import shorten

LONG = "\n".join(f"Sentence {n} of the article is told here." for n in range(60))
T0 = {
    "cnn_dailymail_3_0_0_news_summary": [f"Summarise the article:\n\n(CNN) -- {LONG}\n"],
    "xsum_summarize_DOC": ["Summarize: A bridge was closed.\nIt opens on Monday.\n"],
    **{
        f"adversarial_qa_{name}_question_context_answer": [
            f'Question: "Who built the {name}?"\n\nContext: "A "fine" {name}.\n\nAnna built it."\n\nAnswer:\n'
        ]
        for name in ("dbert", "dbidaf", "droberta")
    },
    "quoref_Given_Context_Answer_Question": [
        "Who left?\n\nAnswer the above question based on the context below:\n\nBo came.\n\nThen Bo left.\n"
    ],
    "ropes_plain_no_background": ["Two cells lie in a dish.\n\nOne is older.\n\nWhich cell is smaller?\n"],
    "kilt_tasks_hotpotqa_straighforward_qa": ["Which of the two rivers is longer?\n"],
    "commonsense_qa_answer_given_question_without_options": ["Answer the following question:\nWhere do foxes live?\n"],
}
TASK = {"instruction": "Correct the text.", "instances": [{"input": "I has a cat.", "output": "I have a cat."}]}
GERMAN = {"dev": "Das Haus steht am Ende der Straße.", "test": "Am Abend gehen wir ins Kino."}


@pytest.fixture
def data(tmp_path):
    for name, records in T0.items():
        write(tmp_path / "tasks" / "t0" / f"{name}.jsonl", [{"prompt": prompt} for prompt in records])
    write(tmp_path / "tasks" / "self_instruct" / "seed_tasks.jsonl", [TASK])
    write(tmp_path / "tasks" / "self_instruct" / "user_oriented_instructions.jsonl", [{**TASK, "instruction": "Go."}])
    (tmp_path / "text").mkdir()
    for part, text in GERMAN.items():
        tree = f"# text = {text}\n1\tDas\tder\n\n# text = Zu kurz.\n"
        (tmp_path / "text" / f"de_gsd-ud-{part}.conllu").write_text(tree, encoding="utf-8")
    return tmp_path


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def made(kind, data):
    return list(getattr(public_tasks, kind)(data, np.random.default_rng(0)))


def mix(data, name, *arguments):
    command = ["--data", data, "--out", data / name, "--mixture", "tasks", *arguments]
    return run_command("prompts", "", prompts.add_arguments, prompts.run, list(map(str, command)))


def test_an_article_comes_in_two_forms(data):
    first, second, *short = made("news", data)
    for prompt in (first, second):
        assert "(CNN) -- Sentence 0 of" in prompt
        assert "Summarise the article" not in prompt
        assert "Sentence 33 of the article is told here." in prompt
        assert "Sentence 34" not in prompt
    assert first != second
    assert len(short) == 2
    assert all("A bridge was closed.\nIt opens on Monday." in prompt for prompt in short)


def test_a_long_text_ends_with_its_last_whole_sentence():
    assert shorten("One two. Three four. Five six.", 4) == "One two. Three four."
    assert shorten("One two.\nThree four.\nFive six.", 5) == "One two.\nThree four."
    assert shorten('"One two?" Three four', 3) == '"One two?"'
    assert shorten("Costs 3.5 dollars and more", 4) == "Costs 3.5 dollars and"
    assert shorten("Dr. Who came to us", 4) == "Dr. Who came to"
    assert shorten(" One two. Three ", 3) == "One two. Three"


def test_a_question_keeps_its_whole_text_and_each_text_has_tasks_of_its_own(data):
    asked = made("reading", data)
    pairs, tasks = asked[:5], asked[5:]
    expected = [(f"Who built the {name}?", f'A "fine" {name}.\n\nAnna built it.') for name in ("dbert", "dbidaf")]
    expected += [("Who built the droberta?", 'A "fine" droberta.\n\nAnna built it.')]
    expected += [("Who left?", "Bo came.\n\nThen Bo left.")]
    expected += [("Which cell is smaller?", "Two cells lie in a dish.\n\nOne is older.")]
    for prompt, (question, text) in zip(pairs, expected, strict=True):
        assert question in prompt
        assert text in prompt
        assert "Answer the above question" not in prompt
    assert len(tasks) == 2 * len(expected)
    for task, (question, text) in zip(tasks, expected + expected):
        assert text in task
        assert question not in task


def test_questions_translations_and_instructions_are_whole(data):
    assert made("question", data) == ["Which of the two rivers is longer?", "Where do foxes live?"]
    assert made("instruction", data) == ["Correct the text.\n\nI has a cat.", "Go.\n\nI has a cat."]
    for prompt, text in zip(made("translation", data), GERMAN.values(), strict=True):
        assert prompt.startswith("Translate")
        assert text in prompt


def test_the_same_seed_gives_the_same_prompts(data, capsys):
    assert mix(data, "a.jsonl", "--count", "20") == 0
    # Of 5, 6.6, 2.8, 2.4 and 3.2 that the shares ask for; there are 4, 15, 2, 2 and 2.
    assert "17 prompts: 4 news, 7 reading, 2 question, 2 translation, 2 instruction" in capsys.readouterr().err
    assert mix(data, "b.jsonl", "--count", "20") == 0
    assert (data / "a.jsonl").read_bytes() == (data / "b.jsonl").read_bytes()
    assert mix(data, "c.jsonl", "--count", "20", "--seed", "1") == 0
    assert (data / "a.jsonl").read_bytes() != (data / "c.jsonl").read_bytes()
    capsys.readouterr()
    assert mix(data, "b.jsonl") == 2
    (data / "text" / "de_gsd-ud-dev.conllu").write_bytes(b"# text = Stra\xdfe")
    assert mix(data, "d.jsonl") == 2
    (data / "text" / "de_gsd-ud-dev.conllu").unlink()
    assert mix(data, "d.jsonl") == 2
    assert capsys.readouterr().err.count("\n") == 3


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("t0/xsum_summarize_DOC", {"text": "no prompt"}),
        ("t0/xsum_summarize_DOC", {"prompt": "Of another template"}),
        ("t0/kilt_tasks_hotpotqa_straighforward_qa", {"prompt": ""}),
        ("self_instruct/seed_tasks", {"instruction": "Correct the text."}),
        ("self_instruct/seed_tasks", {"instruction": None, "instances": [{"input": "x"}]}),
        ("self_instruct/seed_tasks", {"instruction": "Correct it.", "instances": ["x"]}),
    ],
)
def test_a_line_of_another_form_is_told_with_its_place(data, capsys, name, line):
    with (data / "tasks" / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert mix(data, "out.jsonl") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{name}.jsonl, line 2: needs" in error
