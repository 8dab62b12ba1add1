"""Tasks whose answers can be checked: queries that must return the right rows, stories without a letter, games."""

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.bench.search.numbers import MOST_TOKENS, is_won, opening, openings

_ROWS = (
    ("Anna", 34, "Oslo", 52000),
    ("Ben", 19, "Rome", 18000),
    ("Carla", 45, "Oslo", 71000),
    ("David", 28, "Paris", 39000),
    ("Eva", 61, "Rome", 64000),
    ("Frank", 23, "Paris", 27000),
    ("Gina", 37, "Oslo", 58000),
    ("Hugo", 52, "Rome", 49000),
)
_QUESTIONS = (
    ("How many people are there?", "SELECT COUNT(*) FROM people"),
    ("What is the name of the oldest person?", "SELECT name FROM people ORDER BY age DESC LIMIT 1"),
    ("What is the highest salary?", "SELECT MAX(salary) FROM people"),
    ("How many people live in Oslo?", "SELECT COUNT(*) FROM people WHERE city = 'Oslo'"),
    ("Which people are older than 40? List their names.", "SELECT name FROM people WHERE age > 40"),
    ("What is the average age?", "SELECT AVG(age) FROM people"),
    ("List all cities, each once.", "SELECT DISTINCT city FROM people"),
    ("Where does Eva live?", "SELECT city FROM people WHERE name = 'Eva'"),
    ("What is the sum of all salaries in Rome?", "SELECT SUM(salary) FROM people WHERE city = 'Rome'"),
    ("Who earns less than 30000? List their names.", "SELECT name FROM people WHERE salary < 30000"),
    ("How old is the youngest person?", "SELECT MIN(age) FROM people"),
    ("List the names of the people in Paris.", "SELECT name FROM people WHERE city = 'Paris'"),
    ("What is the average salary in Oslo?", "SELECT AVG(salary) FROM people WHERE city = 'Oslo'"),
    ("How many people are younger than 30?", "SELECT COUNT(*) FROM people WHERE age < 30"),
    ("How old is Hugo?", "SELECT age FROM people WHERE name = 'Hugo'"),
    ("List all names in alphabetical order.", "SELECT name FROM people ORDER BY name"),
)
_EXAMPLES = (
    ("List all ages.", "SELECT age FROM people"),
    ("Who is 23 years old? List the names.", "SELECT name FROM people WHERE age = 23"),
)
_OPENINGS = (
    "The old captain walked down to the harbour",
    "My grandmother's garden was full of",
    "Last winter we found a small dog",
    "The train to the mountains was",
    "In the kitchen, the cook was baking",
    "Two friends met at the market",
    "The teacher closed the book and said",
    "On Sunday morning the whole village",
)
# Some queries of a model would run for hours.
_MOST_OPERATIONS = 100_000


@dataclass(frozen=True)
class Problem:
    """A prompt, and what its answer is worth: 1 is right, less is on the way."""

    prompt: str
    worth: Callable[[str, bool], float]


@dataclass(frozen=True)
class Task:
    """Problems, how many tokens an answer may have, and the strings that end one."""

    name: str
    problems: tuple[Problem, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ("\n\n",)


def sql_task() -> Task:
    """Return questions about a table: a query is right if it returns the right rows, and worth half if it runs."""
    examples = "".join(f"-- {question}\n{query};\n\n" for question, query in _EXAMPLES)
    head = f"-- SQLite. Table people(name TEXT, age INTEGER, city TEXT, salary INTEGER)\n\n{examples}"

    def problem(question: str, query: str) -> Problem:
        expected = run_query(query)

        def worth(text: str, is_whole: bool) -> float:
            written, semicolon, _ = text.partition(";")
            if not (semicolon or is_whole):
                return 0.25
            found = run_query("SELECT" + written)
            return 0.0 if found is None else 1.0 if found == expected else 0.5

        return Problem(f"{head}-- {question}\nSELECT", worth)

    return Task("sql", tuple(problem(*each) for each in _QUESTIONS), 24)


def letter_task(letter: str = "e") -> Task:
    """Return the beginnings of stories, to be continued without a letter: worth the share of text before it comes."""

    def worth(text: str, is_whole: bool) -> float:
        place = text.lower().find(letter)
        return 1.0 if place < 0 else place / len(text)

    return Task(f"without {letter}", tuple(Problem(opening, worth) for opening in _OPENINGS), 16)


def numbers_task(count: int = 64) -> Task:
    """Return games of arithmetic, won or lost (`jaxinfer.bench.search.numbers`): for ``python -m train.numbers``."""
    pairs = openings(held_out=True)
    chosen = np.random.default_rng(0).permutation(len(pairs))[:count]

    def problem(start: int, target: int) -> Problem:
        return Problem(opening(start, target), lambda text, is_whole: float(is_whole and is_won(start, target, text)))

    return Task("numbers", tuple(problem(*pairs[which]) for which in chosen), MOST_TOKENS + 1, stop=())


def run_query(query: str) -> list[tuple[Any, ...]] | None:
    """Return the rows that a query returns from the table of the task, None if it does not run."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("CREATE TABLE people(name TEXT, age INTEGER, city TEXT, salary INTEGER)")
        connection.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", _ROWS)
        connection.set_progress_handler(lambda: 1, _MOST_OPERATIONS)
        return connection.execute(query).fetchall()
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None
    finally:
        connection.close()


TASKS: Mapping[str, Callable[[], Task]] = MappingProxyType(
    {"sql": sql_task, "letter": letter_task, "numbers": numbers_task}
)
