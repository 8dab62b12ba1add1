"""The command line: finds the subcommand, and turns every failure of the user's world into one line."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import MappingProxyType

from jaxinfer import __version__
from jaxinfer.cli.interrupts import delivered_interrupts
from jaxinfer.cli.processes import error_stream
from jaxinfer.command_line import Parser, describe
from jaxinfer.errors import JaxinferError, one_line

# Where each subcommand's ``add_arguments`` and ``run`` stand; only the one that is asked for is imported.
COMMANDS = MappingProxyType(
    {
        "generate": ("jaxinfer.cli.commands.generate", "continue prompts, or answer them with --chat"),
        "chat": ("jaxinfer.cli.commands.chat", "hold a conversation in the terminal"),
        "serve": ("jaxinfer.cli.commands.serve", "serve a model to clients of OpenAI's API, and a page to chat on"),
        "replay": ("jaxinfer.cli.commands.replay", "answer a server's logged requests again, and compare every bit"),
        "verify": ("jaxinfer.cli.commands.verify", "compare the output of a strategy with plain decoding"),
        "fetch": ("jaxinfer.cli.commands.fetch", "download a known model to the local cache"),
        "convert": ("jaxinfer.cli.commands.convert", "write any supported model as one folder, in Orbax's format"),
        "plan": (
            "jaxinfer.cli.commands.plan",
            "say whether a model fits on TPUs that are not here, and how fast it can be",
        ),
        "bench": ("jaxinfer.cli.commands.bench", "measure throughput, acceptance rates and speed-ups"),
    }
)

EXIT_LOST_PEER = 1
EXIT_UNEXPECTED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def console() -> int:
    """Run this process's command line; where Ctrl-C or the loss of another process ends it, leave at once.

    JAX may still be compiling or computing in threads of its own, and crashes when Python tears down under them; and
    it would wait for the process that was lost.
    """
    return main(leave=os._exit)


def main(arguments: Sequence[str] | None = None, leave: Callable[[int], int] = int) -> int:
    """Run one command line and return its exit code.

    0, 1 where another process was lost, 2 for a mistake, 130 for Ctrl-C, 141 for a reader that left, or the command's.
    A process of several that fails leaves at once: at its regular end JAX would wait for the others, and they for it.
    """
    end = lambda code: leave(code) if _has_joined() else code  # noqa: E731
    try:
        with delivered_interrupts():
            code = _run(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _drain_output()
        print(file=sys.stderr, flush=True)
        return leave(EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drain_output()
        return end(EXIT_BROKEN_PIPE)
    except JaxinferError as error:
        return end(_report(str(error)))
    except OSError as error:
        return end(_report(describe(error)))
    except MemoryError:
        return end(_report("this machine's memory is full; use --dtype bfloat16, a smaller --max-len or fewer prompts"))
    except Exception as error:
        # JAX has one class for all errors of the device; of these only a full memory can be the user's to mend.
        if "RESOURCE_EXHAUSTED" not in str(error):
            if not _lost_peer(error):
                if _has_joined():
                    traceback.print_exc()
                    return leave(EXIT_UNEXPECTED)
                raise
            _report("another process of this run ended or can no longer be reached, so this one ends too")
            return leave(EXIT_LOST_PEER)
        return end(_report("the device's memory is full; use --dtype bfloat16, a smaller --max-len or fewer prompts"))


def _run(arguments: list[str]) -> int:
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = Parser(prog="jaxinfer", description="Run language models fast, on TPUs and everywhere else.")
    parser.add_argument("--version", action="version", version=f"jaxinfer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = None
    for command, (home, summary) in COMMANDS.items():
        subparser = commands.add_parser(command, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if command == name:
            module = importlib.import_module(home)
            module.add_arguments(subparser)
            run = module.run
    options, unknown = parser.parse_known_args(arguments)
    if run is None or name is None:  # the parser has refused every name but those
        raise AssertionError(f"command {options.command} was not dispatched")
    if unknown:
        commands.choices[name].error(f"unrecognized arguments: {' '.join(unknown)}")
    _make_output_total()
    return run(options)


def _make_output_total() -> None:
    """Let text that the terminal's encoding lacks be printed with question marks rather than end in an error."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def _report(message: str) -> int:
    _drain_output()
    print(f"error: {one_line(message)}", file=error_stream(), flush=True)
    return EXIT_MISTAKE


def _lost_peer(error: Exception) -> bool:
    if "jax" not in sys.modules:
        return False
    from jaxinfer.distributed import is_lost_peer

    return is_lost_peer(error)


def _has_joined() -> bool:
    """Tell whether this process runs with others."""
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def _drain_output() -> None:
    """Write what standard output still holds; where that fails, drop it, or Python would complain at its end."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
