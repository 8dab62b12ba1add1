"""Prints a chat template that knows tools, for models like the default one, which were taught none."""

from tests.server.tools.templates import HERMES

if __name__ == "__main__":
    print(HERMES, end="")
