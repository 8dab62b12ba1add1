"""``python -m train.data``: creates training data, by one of five commands.

``prompts`` lets a chat model write prompts, ``distill`` lets a model answer prompts, ``best`` keeps the best answers,
``rollouts`` lets a model answer each prompt several times and a checker score the answers, ``task`` writes tasks with
answers.
"""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``python -m train.data``."""
    from train.data import best_answers, rollouts, self_prompts, target_texts
    from train.data import tasks as task_data

    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module, summary in (
        ("prompts", self_prompts, "let a chat model write prompts; an interrupted run goes on"),
        ("distill", target_texts, "let a model answer prompts, as training targets; an interrupted run goes on"),
        ("best", best_answers, "keep the best share of a model's answers, by their likelihood or by checks"),
        ("rollouts", rollouts, "let a model answer prompts several times, and a checker score that; it goes on too"),
        ("task", task_data, "write tasks with known answers, from public data sets"),
    ):
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)


if __name__ == "__main__":
    from train.command import run_command

    sys.exit(run_command("data", "Make training data.", add_arguments, lambda options: options.run(options)))
