"""``python -m train.data``: creates training data, by one of three commands.

``prompts`` lets a chat model write prompts, ``distill`` lets a model answer prompts, ``task`` writes tasks with
answers.
"""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``python -m train.data``."""
    from train.data import self_prompts, target_texts
    from train.data import tasks as task_data

    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module, summary in (
        ("prompts", self_prompts, "have a chat model write prompts; goes on where it was interrupted"),
        ("distill", target_texts, "have a model answer prompts, as targets; goes on where it was interrupted"),
        ("task", task_data, "write tasks with a right answer, of public data sets"),
    ):
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)


if __name__ == "__main__":
    from train.command import run_command

    sys.exit(run_command("data", "Make data for training.", add_arguments, lambda options: options.run(options)))
