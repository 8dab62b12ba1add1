"""Prompts of everyday tasks from public data sets: news, questions with and without a text, translation, instructions.

A folder has, under ``tasks/t0``, the samples of T0's training tasks that the repository ``yizhongw/self-instruct`` on
GitHub publishes (CNN/DailyMail, XSum, AdversarialQA, Quoref, ROPES, HotpotQA, CommonsenseQA), under
``tasks/self_instruct`` that repository's own ``seed_tasks.jsonl`` and ``user_oriented_instructions.jsonl``, and under
``text`` the sentences of the German treebank GSD, ``de_gsd-ud-dev.conllu`` and ``de_gsd-ud-test.conllu``.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidOption
from train.data.passages import about_passages
from train.texts.records import read_records

# Longer than this, an article costs more time than it teaches.
_WORDS_OF_ARTICLE = 280


def news(data: Path, rng: Any) -> Iterator[str]:
    """Yield prompts to summarize news."""
    forms = (
        "Summarize: {article}",
        "Summarize: {article}",
        "Summarize this news article in a few sentences.\n\n{article}",
        "{article}\n\nTL;DR:",
        "Write a headline and a short summary for this article: {article}",
        "What happened, and who was involved?\n\n{article}",
    )
    articles = [text.partition("\n\n")[2] for text in _t0(data, "cnn_dailymail_3_0_0_news_summary")]
    articles += [text.removeprefix("Summarize: ") for text in _t0(data, "xsum_summarize_DOC")]
    for article in articles:
        cut = _shorten(article, _WORDS_OF_ARTICLE)
        # Two of the forms for each: the answers differ.
        for form in rng.choice(len(forms), 2, replace=False):
            yield forms[form].format(article=cut)


def reading(data: Path, rng: Any) -> Iterator[str]:
    """Yield questions with the text that answers them, and tasks on these texts."""
    forms = (
        "{text}\n\nBased on the passage above, can you answer the question: {question}",
        "{text}\n\n{question}",
        "Context: {text}\nQuestion: {question}\nAnswer:",
        "Answer the question with the help of the text.\n\nText: {text}\n\nQuestion: {question}",
        "{question}\n\n{text}",
    )
    pairs = []
    for name in ("dbert", "dbidaf", "droberta"):
        for prompt in _t0(data, f"adversarial_qa_{name}_question_context_answer"):
            found = re.fullmatch(r'Question: "(.*?)"\s+Context: "(.*)"\s+Answer:\s*', prompt, re.S)
            if found:
                pairs.append((found[1], found[2]))
    for prompt in _t0(data, "quoref_Given_Context_Answer_Question"):
        asked, _, text = prompt.partition("\n\n")
        pairs.append((asked, text.partition("\n\n")[2]))
    for prompt in _t0(data, "ropes_plain_no_background"):
        text, _, asked = prompt.strip().rpartition("\n\n")
        pairs.append((asked, text))
    for asked, text in pairs:
        yield str(rng.choice(forms)).format(question=asked, text=_shorten(text, _WORDS_OF_ARTICLE))
    texts = list(dict.fromkeys(_shorten(text, _WORDS_OF_ARTICLE) for _, text in pairs))
    yield from about_passages(texts, rng)
    yield from about_passages(texts, rng)


def question(data: Path, rng: Any) -> Iterator[str]:
    """Yield questions on general knowledge, without a text."""
    for prompt in _t0(data, "kilt_tasks_hotpotqa_straighforward_qa"):
        yield prompt.strip()
    for prompt in _t0(data, "commonsense_qa_answer_given_question_without_options"):
        yield prompt.partition("\n")[2].strip()


def translation(data: Path, rng: Any) -> Iterator[str]:
    """Yield German sentences to translate."""
    forms = ("Translate German to English: {text}",) * 3 + ("Translate this into English.\n{text}",)
    for part in ("dev", "test"):
        treebank = (data / "text" / f"de_gsd-ud-{part}.conllu").read_text(encoding="utf-8")
        for text in re.findall("^# text = (.*)", treebank, re.M):
            if 5 <= len(text.split()) <= 40:
                yield str(rng.choice(forms)).format(text=text)


def instruction(data: Path, rng: Any) -> Iterator[str]:
    """Yield instructions, with their input if they have one."""
    for name in ("seed_tasks", "user_oriented_instructions"):
        for record in read_records(data / "tasks" / "self_instruct" / f"{name}.jsonl"):
            try:
                inputs = [str(instance["input"]) for instance in record.fields["instances"][:2]]
            except (KeyError, TypeError):
                raise InvalidOption(f"{record.where}: needs 'instances' with an 'input' each") from None
            for given in inputs:
                yield f"{record.text('instruction')}\n\n{_shorten(given, _WORDS_OF_ARTICLE)}".strip()


def _t0(data: Path, name: str) -> list[str]:
    return [record.text("prompt") for record in read_records(data / "tasks" / "t0" / f"{name}.jsonl")]


def _shorten(text: str, most: int) -> str:
    """Return a text of at most ``most`` words, to the end of its last whole sentence; its lines stay as they are."""
    words = list(re.finditer(r"\S+", text.strip()))
    if len(words) <= most:
        return text.strip()
    cut = text.strip()[: words[most - 1].end()]
    return cut[: cut.rindex(". ") + 1] if ". " in cut else cut
