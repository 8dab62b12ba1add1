"""Prompts of everyday tasks from public data sets: news, questions with and without a text, translation, instructions.

A folder has, under ``tasks/t0``, samples of T0's training tasks (CNN/DailyMail, XSum, AdversarialQA, Quoref, ROPES,
HotpotQA, CommonsenseQA): files of ``data/finetuning/t0_train_50k/data_per_template`` in the repository
``yizhongw/self-instruct`` on GitHub. Under ``tasks/self_instruct`` it has that repository's ``seed_tasks.jsonl`` and
``user_oriented_instructions.jsonl``, and under ``text`` the German treebank GSD of Universal Dependencies:
``de_gsd-ud-dev.conllu`` and ``de_gsd-ud-test.conllu``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.errors import InvalidOption
from train.data.passages import about_passages
from train.texts.records import read_records

# Longer than this, a text costs more time than it teaches.
_MOST_WORDS = 280
_END_OF_SENTENCE = r"[.?!][\"'”’)]*(?=\s|$)"


class _Pair(NamedTuple):
    question: str
    text: str


def news(data: Path, rng: Any) -> Iterator[str]:
    """Yield prompts to summarize news, two for each article."""
    forms = (
        "Summarize: {article}",
        "Summarize this news article in a few sentences.\n\n{article}",
        "{article}\n\nTL;DR:",
        "Write a headline and a short summary for this article: {article}",
        "What happened, and who was involved?\n\n{article}",
    )
    found = _t0(data, "cnn_dailymail_3_0_0_news_summary", r"Summarise the article:\n\n(?P<text>.+)")
    found += _t0(data, "xsum_summarize_DOC", r"Summarize: (?P<text>.+)")
    for one in found:
        article = shorten(one["text"])
        for form in rng.choice(len(forms), 2, replace=False):
            yield forms[form].format(article=article)


def reading(data: Path, rng: Any) -> Iterator[str]:
    """Yield questions on texts, each with its text, and tasks on these texts; long texts are cut."""
    forms = (
        "{text}\n\nBased on the passage above, can you answer the question: {question}",
        "{text}\n\n{question}",
        "Context: {text}\nQuestion: {question}\nAnswer:",
        "Answer the question with the help of the text.\n\nText: {text}\n\nQuestion: {question}",
        "{question}\n\n{text}",
    )
    found = []
    for name in ("dbert", "dbidaf", "droberta"):
        quoted = r'Question: "(?P<question>.+?)"\s+Context: "(?P<text>.+)"\s+Answer:\s*'
        found += _t0(data, f"adversarial_qa_{name}_question_context_answer", quoted)
    asked = r"(?P<question>.+?)\n\nAnswer the above question based on the context below:\n\n(?P<text>.+)"
    found += _t0(data, "quoref_Given_Context_Answer_Question", asked)
    found += _t0(data, "ropes_plain_no_background", r"(?P<text>.+)\n\n(?P<question>.+?)\s*")
    pairs = [_Pair(one["question"], shorten(one["text"])) for one in found]
    for pair in pairs:
        yield str(rng.choice(forms)).format(**pair._asdict())
    texts = list(dict.fromkeys(pair.text for pair in pairs))
    yield from about_passages(texts, rng)
    yield from about_passages(texts, rng)


def question(data: Path, rng: Any) -> Iterator[str]:
    """Yield questions on general knowledge, without a text."""
    name = "commonsense_qa_answer_given_question_without_options"
    found = _t0(data, "kilt_tasks_hotpotqa_straighforward_qa", r"(?P<question>.+?)\s*")
    for one in found + _t0(data, name, r"Answer the following question:\n(?P<question>.+?)\s*"):
        yield one["question"]


def translation(data: Path, rng: Any) -> Iterator[str]:
    """Yield German sentences to translate."""
    forms, shares = ("Translate German to English: {text}", "Translate this into English.\n{text}"), (0.75, 0.25)
    for part in ("dev", "test"):
        path = data / "text" / f"de_gsd-ud-{part}.conllu"
        try:
            treebank = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidOption(f"{path}: not UTF-8 text; convert the file to UTF-8") from None
        for text in re.findall("^# text = (.*)", treebank, re.M):
            if 5 <= len(text.split()) <= 40:
                yield str(rng.choice(forms, p=shares)).format(text=text)


def instruction(data: Path, rng: Any) -> Iterator[str]:
    """Yield instructions, with their input if they have one."""
    for name in ("seed_tasks", "user_oriented_instructions"):
        for record in read_records(data / "tasks" / "self_instruct" / f"{name}.jsonl"):
            try:
                inputs = [str(instance["input"]) for instance in record.fields["instances"][:2]]
            except (KeyError, TypeError):
                raise InvalidOption(f"{record.where}: needs 'instances' with an 'input' each") from None
            for given in inputs:
                yield f"{record.text('instruction')}\n\n{shorten(given)}".strip()


def shorten(text: str, most: int = _MOST_WORDS) -> str:
    """Return a text of at most ``most`` words; its lines stay as they are.

    A longer one ends with its last whole sentence, or with a word where that would leave less than half.
    """
    text = text.strip()
    words = list(re.finditer(r"\S+", text))
    if len(words) <= most:
        return text
    cut = text[: words[most - 1].end()]
    ends = [end.end() for end in re.finditer(_END_OF_SENTENCE, cut)]
    return cut[: ends[-1]] if ends and ends[-1] * 2 >= len(cut) else cut


def _t0(data: Path, name: str, pattern: str) -> list[re.Match[str]]:
    """Return the prompts of a file, matched; raises InvalidOption for a prompt of another form."""
    found = []
    for record in read_records(data / "tasks" / "t0" / f"{name}.jsonl"):
        match = re.fullmatch(pattern, record.text("prompt"), re.S)
        if match is None:
            raise InvalidOption(f"{record.where}: needs a prompt as T0 has it for {name}")
        found.append(match)
    return found
