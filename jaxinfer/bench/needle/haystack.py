"""Long texts of plain sentences that hold facts, needles, of which the end asks for one."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NAMES = (
    *("Oslo", "Rome", "Paris", "Vienna", "Lisbon", "Madrid", "Dublin", "Athens", "Cairo", "Lima", "Delhi", "Kyoto"),
    *(
        "Hanoi",
        "Boston",
        "Denver",
        "Dallas",
        "Milan",
        "Turin",
        "Lagos",
        "Perth",
        "Sydney",
        "London",
        "Berlin",
        "Prague",
    ),
)
SECRETS = (
    *("red", "blue", "green", "black", "white", "gold", "silver", "pink", "brown", "grey", "purple", "orange"),
    *("lion", "horse", "tiger", "sheep", "mouse", "eagle", "snake", "whale", "rabbit", "wolf", "bear", "fox"),
)
_WHO = ("farmer", "teacher", "sailor", "doctor", "baker", "painter", "singer", "driver")
_DOES = ("walks", "runs", "looks", "comes", "sits", "waits", "sleeps", "talks")
_WHERE = ("river", "house", "garden", "market", "bridge", "forest", "school", "harbour")
# Facts that nothing asks for; there are no more than this many names.
OTHERS = 7
MOST_OTHERS = len(NAMES) - 1
_HOW = ("near", "behind", "beside", "towards")


class Haystack(NamedTuple):
    """A text that ends with a question, the word that answers it, and at what share of the text the fact stands."""

    prompt: str
    answer: str
    depth: float


def fact(name: str, secret: str) -> str:
    """Say a needle; without its last word and stop it asks for itself (`question`)."""
    return f"{question(name)}{secret}."


def question(name: str) -> str:
    """Ask for the secret of a name: what comes next is the answer."""
    return f"{name}="


def plain_sentence(rng: np.random.Generator) -> str:
    """Say what nothing asks for."""
    who, does, how, where = (words[rng.integers(len(words))] for words in (_WHO, _DOES, _HOW, _WHERE))
    return f"The {who} {does} {how} the {where}."


def haystack(length: int, count: Callable[[str], int], depth: float, seed: int, others: int = OTHERS) -> Haystack:
    """Make a text of at most ``length`` tokens with a fact at a share ``depth`` of it, and ``others`` anywhere.

    ``count`` gives the tokens of a sentence.
    """
    rng = np.random.default_rng(seed)
    names, secrets = (rng.permutation(words)[: others + 1].tolist() for words in (NAMES, SECRETS))
    facts = [fact(name, secret) for name, secret in zip(names, secrets)]
    left = length - count(question(names[0])) - sum(map(count, facts))
    plain: list[str] = []
    while (left := left - count(sentence := plain_sentence(rng))) >= 0:
        plain.append(sentence)
    places = [min(len(plain), round(depth * len(plain))), *rng.integers(len(plain) + 1, size=others).tolist()]
    for place, said in sorted(zip(places, facts), reverse=True):
        plain.insert(place, said)
    return Haystack(" ".join([*plain, question(names[0])]), secrets[0], depth)


def vocabulary() -> list[str]:
    """Return what stands between spaces in all haystacks."""
    facts = [fact(name, secret) for name in NAMES for secret in SECRETS]
    return [
        "The",
        "the",
        *_WHO,
        *_DOES,
        *_HOW,
        *(f"{word}." for word in (*SECRETS, *_WHERE)),
        *map(question, NAMES),
        *facts,
    ]
