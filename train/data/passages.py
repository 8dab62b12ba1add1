"""Passages of prose, and prompts about them."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

_WORDS_OF_PASSAGE = 130


def split_passages(text: str) -> Iterator[str]:
    """Yield paragraphs of prose, cut to a number of words."""
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        cut = " ".join(words[:_WORDS_OF_PASSAGE])
        is_prose = len(words) > 40 and cut[0].isupper() and ".." not in cut and "<unk>" not in cut
        if is_prose and ". " in cut:
            yield cut[: cut.rindex(". ") + 1]


def about_passages(passages: Iterable[str], rng: Any) -> Iterator[str]:
    """Yield one prompt about each passage."""
    forms = (
        "Summarize: {passage}",
        "Summarize the following text in two sentences.\n\n{passage}",
        "{passage}\n\nWhat are the most important points of this text?",
        "Read this and write three questions with their answers.\n\n{passage}",
        "{passage} Based on the text above, what is it about?",
        "Rewrite this in simpler words: {passage}",
        "{passage} Question: what does the text say first? Answer:",
        "Extract the names and numbers from the text as a list.\n\n{passage}",
    )
    for passage in passages:
        yield str(rng.choice(forms)).format(passage=passage)
