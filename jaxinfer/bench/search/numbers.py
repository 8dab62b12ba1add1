"""A game of arithmetic that is easy to check and hard to play: reach a number from another one by a few moves.

A text is ``7 to 24 : *2 14 +7 21 ...  .``: moves, each with the number that it gives, and a stop. A game is won if all
numbers are right and the last one is the one asked for.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from jaxinfer.text_values import Candidate

MOVES = ("+7", "-3", "*2")
SIZE, MOST_MOVES = 100, 6
# A move and a number each, and the stop.
MOST_TOKENS = 2 * MOST_MOVES + 1
# Games of so many moves at the least are played.
_SHORTEST = 3
# One of so many pairs of numbers is never trained on.
_HELD_OUT = 8


def moved(number: int, move: str) -> int | None:
    """Return what a move makes of a number, None where that leaves the numbers from 0 to 99."""
    found = {"+7": number + 7, "-3": number - 3, "*2": number * 2}[move]
    return found if 0 <= found < SIZE else None


def opening(start: int, target: int) -> str:
    """Ask for a game; what comes next is its first move."""
    return f"{start} to {target} :"


def is_won(start: int, target: int, text: str) -> bool:
    """Tell whether a whole answer reaches the target, by right numbers and in time."""
    *words, stop = text.split() or [""]
    if stop != "." or len(words) % 2 or len(words) > 2 * MOST_MOVES or not words:
        return False
    number: int | None = start
    for move, said in zip(words[::2], words[1::2]):
        number = moved(number, move) if move in MOVES else None
        if number is None or said != str(number):
            return False
    return number == target


def won(candidates: Sequence[Candidate]) -> list[float]:
    """Return 1 for games that are won and 0 for others: a function as ``generate(value=...)`` takes it."""
    found = []
    for one in candidates:
        start, _, target, _ = str(one.prompt).split()
        found.append(float(one.is_whole and is_won(int(start), int(target), one.text)))
    return found


@cache
def distances(target: int) -> tuple[int, ...]:
    """Return by number how many moves there are to a target at the least, `SIZE` where there is no way."""
    found = [SIZE] * SIZE
    found[target] = 0
    for so_far in range(SIZE):
        for number in range(SIZE):
            if found[number] == SIZE and any(
                at is not None and found[at] == so_far for at in (moved(number, move) for move in MOVES)
            ):
                found[number] = so_far + 1
    return tuple(found)


def openings(held_out: bool) -> list[tuple[int, int]]:
    """Return the starts and targets that are trained on, or the others."""
    pairs = []
    for target in range(SIZE):
        for start, away in enumerate(distances(target)):
            if _SHORTEST <= away <= MOST_MOVES and ((13 * start + 7 * target) % _HELD_OUT == 0) == held_out:
                pairs.append((start, target))
    return pairs


def game(start: int, target: int, skill: float, rng: np.random.Generator) -> str:
    """Play a game: each move is one of the best with probability ``skill``, else any that is possible."""
    words, number, away = [opening(start, target)], start, distances(target)
    for _ in range(MOST_MOVES):
        after = {move: at for move in MOVES if (at := moved(number, move)) is not None}
        nearest = min(away[at] for at in after.values())
        best = [move for move, at in after.items() if away[at] == nearest]
        choice = best if rng.random() < skill else list(after)
        move = choice[rng.integers(len(choice))]
        number = after[move]
        words += [move, str(number)]
        if number == target:
            break
    return " ".join([*words, "."])


def vocabulary() -> list[str]:
    """Return the words of all games."""
    return ["to", ":", ".", *MOVES, *map(str, range(SIZE))]
