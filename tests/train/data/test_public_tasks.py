"""Prompts of everyday tasks, from files as their data sets publish them."""

import json

import numpy as np
import pytest

from train import prompts
from train.command import run_command
from train.data import public_tasks

LONG = " ".join(f"Sentence {n} of the article is told here." for n in range(60))
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
TREE = "# text = Das Haus steht am Ende der Straße.\n1\tDas\tder\n\n# text = Zu kurz.\n"


@pytest.fixture
def data(tmp_path):
    for name, records in T0.items():
        write(tmp_path / "tasks" / "t0" / f"{name}.jsonl", [{"prompt": prompt} for prompt in records])
    for name in ("seed_tasks", "user_oriented_instructions"):
        write(tmp_path / "tasks" / "self_instruct" / f"{name}.jsonl", [TASK])
    (tmp_path / "text").mkdir()
    for part in ("dev", "test"):
        (tmp_path / "text" / f"de_gsd-ud-{part}.conllu").write_text(TREE, encoding="utf-8")
    return tmp_path


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def made(kind, data):
    return list(getattr(public_tasks, kind)(data, np.random.default_rng(0)))


def test_an_article_comes_in_two_forms_and_ends_with_a_whole_sentence(data):
    first, second, *short = made("news", data)
    for prompt in (first, second):
        assert "(CNN) -- Sentence 0 of" in prompt
        assert "Summarise the article" not in prompt
        assert "Sentence 33 of the article is told here." in prompt
        assert "Sentence 34" not in prompt
    assert first != second
    assert len(short) == 2
    assert all("A bridge was closed.\nIt opens on Monday." in prompt for prompt in short)


def test_a_question_keeps_its_whole_text_and_each_text_has_tasks_of_its_own(data):
    asked = made("reading", data)
    pairs, tasks = asked[:5], asked[5:]
    expected = [(f"Who built the {name}?", f'A "fine" {name}.\n\nAnna built it.') for name in ("dbert", "dbidaf")]
    expected += [("Who built the droberta?", 'A "fine" droberta.\n\nAnna built it.'), ("Who left?", "Then Bo left.")]
    expected += [("Which cell is smaller?", "Two cells lie in a dish.\n\nOne is older.")]
    for prompt, (question, text) in zip(pairs, expected, strict=True):
        assert question in prompt
        assert text in prompt
        assert "Answer the above question" not in prompt
    assert "Bo came." in pairs[3]
    assert len(tasks) == 2 * len(expected)
    assert all(text in task and question not in task for task, (question, text) in zip(tasks, expected + expected))


def test_questions_translations_and_instructions_are_whole(data):
    assert made("question", data) == ["Which of the two rivers is longer?", "Where do foxes live?"]
    assert made("instruction", data) == ["Correct the text.\n\nI has a cat."] * 2
    for prompt in made("translation", data):
        assert prompt.startswith("Translate")
        assert "Das Haus steht am Ende der Straße." in prompt
    assert len(made("translation", data)) == 2


def test_a_mixture_has_the_shares_and_the_same_seed_gives_the_same_prompts(data, capsys):
    def mix(name, *arguments):
        command = ["--data", data, "--out", data / name, *arguments]
        return run_command("prompts", "", prompts.add_arguments, prompts.run, list(map(str, command)))

    assert mix("a.jsonl", "--mixture", "tasks", "--count", "20") == 0
    assert "4 news, 7 reading, 2 question, 1 translation, 1 instruction" in capsys.readouterr().err
    assert mix("b.jsonl", "--mixture", "tasks", "--count", "20") == 0
    assert (data / "a.jsonl").read_bytes() == (data / "b.jsonl").read_bytes()
    capsys.readouterr()
    assert mix("b.jsonl", "--mixture", "tasks") == 2
    assert mix("c.jsonl") == 2  # the data sets of the other mixture are not there
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("t0/xsum_summarize_DOC", {"text": "no prompt"}),
        ("self_instruct/seed_tasks", {"instruction": "Correct the text."}),
        ("self_instruct/seed_tasks", {"instruction": None, "instances": [{"input": "x"}]}),
        ("self_instruct/seed_tasks", {"instruction": "Correct it.", "instances": ["x"]}),
    ],
)
def test_a_file_with_other_fields_is_one_line_with_its_place(data, capsys, name, line):
    write(data / "tasks" / f"{name}.jsonl", [TASK if "self" in name else {"prompt": "Summarize: x"}, line])
    command = ["--data", data, "--out", data / "out.jsonl", "--mixture", "tasks"]
    assert run_command("prompts", "", prompts.add_arguments, prompts.run, list(map(str, command))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{name}.jsonl, line 2: needs" in error
