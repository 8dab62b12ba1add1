"""``jaxinfer serve``: an OpenAI-compatible server."""

import argparse
import contextlib
import dataclasses
import importlib.util
import logging
import socket
from pathlib import Path
from typing import Any, get_args

from jaxinfer.cli.arguments import add_adapter_argument, add_model_arguments, positive_number, whole_number
from jaxinfer.cli.processes import add_process_arguments, check_processes, error_stream
from jaxinfer.engine.config import Drafting, EngineConfig, Preemption, PrefixCache
from jaxinfer.errors import InvalidOption

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
_CHOICES = {
    "preemption": get_args(Preemption),
    "prefix_cache": get_args(PrefixCache),
    "drafting": get_args(Drafting),
}
_DECIMALS = ("memory", "waiting_served_ratio", "aging_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``serve``."""
    parser.add_argument(
        "--host", metavar="H", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)"
    )
    parser.add_argument(
        "--port", metavar="N", type=_port, default=8000, help="port to listen on; 0 takes a free one (default: 8000)"
    )
    parser.add_argument(
        "--strategy",
        metavar="S",
        default="autoregressive",
        help="how to decode: NAME or NAME:key=value,... (default: %(default)s)",
    )
    parser.add_argument("--name", metavar="M", help="the model's name in requests (default: the end of --model)")
    parser.add_argument(
        "--tool-format",
        metavar="F",
        default="auto",
        help="how the model writes calls of functions: hermes, llama3, mistral, mistral-named, or auto, by its chat "
        "template (default: %(default)s)",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        type=Path,
        help="file with the chat template to use (default: the model's own)",
    )
    group = parser.add_argument_group("clients")
    group.add_argument(
        "--api-key", metavar="KEY", action="append", default=[], help="let in who sends this key; may be repeated"
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help="file of keys, one a line: KEY, or sha256:HASH",
    )
    for name, default, text in (
        ("--timeout", 600.0, "for a request, waiting included"),
        ("--read-timeout", 30.0, "for a client to send a request"),
        ("--write-timeout", 30.0, "for a client that has stopped reading to go on"),
        ("--grace", 30.0, "for requests to finish after a signal to end"),
    ):
        group.add_argument(
            name, metavar="S", type=positive_number, default=default, help=f"seconds {text} (default: %(default)g)"
        )
    for name, default, text in (
        ("--max-body-bytes", 4 << 20, "most bytes of a request"),
        ("--max-connections", 1024, "most connections at a time"),
        ("--max-requests-per-minute", None, "most requests of a key (without keys: of all) in a minute"),
        ("--max-tokens-per-minute", None, "most tokens, of prompts and answers, likewise"),
    ):
        group.add_argument(
            name, metavar="N", type=whole_number(1), default=default, help=f"{text} (default: {default or 'no limit'})"
        )
    log = parser.add_argument_group("log")
    log.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="add each request and its answer to this file, as ids, for jaxinfer replay (default: nothing is kept)",
    )
    log.add_argument("--log-text", action="store_true", help="write their texts there, too")
    add_model_arguments(parser)
    add_adapter_argument(parser, is_many=True)
    add_process_arguments(parser)
    _add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; return 0."""
    if any(importlib.util.find_spec(name) is None for name in _PACKAGES):
        raise InvalidOption('serve needs packages that are not installed: pip install "jaxinfer[serve]"')
    from jaxinfer.server.http.keys import read_keys

    if options.log_text and options.log is None:
        raise InvalidOption("--log-text is for a log: give --log FILE")
    check_processes(options)
    keys = read_keys(options.api_key, options.api_key_file)
    config = EngineConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(EngineConfig)})
    # Imported here: a mistake in the options is told before JAX is waited for.
    from jaxinfer.cli.loading import load_model
    from jaxinfer.decoding.registry import parse_strategy
    from jaxinfer.model_loading import DEFAULT_MODEL
    from jaxinfer.server.following import follow
    from jaxinfer.server.http.hosts import is_loopback
    from jaxinfer.server.log.writer import RequestLog
    from jaxinfer.server.options import ServerOptions
    from jaxinfer.server.served import Served
    from jaxinfer.server.serving import Serving, listen
    from jaxinfer.server.tools.formats import AUTO, BY_NAME
    from jaxinfer.tokenizers import read_chat_template, use_chat_template

    parse_strategy(options.strategy)
    if options.tool_format not in (AUTO, *BY_NAME):
        raise InvalidOption(f"--tool-format {options.tool_format!r} is none of {', '.join((AUTO, *BY_NAME))}")
    template = None if options.chat_template is None else read_chat_template(options.chat_template)
    is_local = is_loopback(options.host)
    name = options.name or _name_of(DEFAULT_MODEL if options.model is None else options.model)
    if name in dict(options.adapter):
        raise InvalidOption(f"--adapter {name}=... has the model's own name: choose another, or another --name")
    server_options = ServerOptions(
        model=name,
        keys=keys,
        is_local=is_local,
        max_body_bytes=options.max_body_bytes,
        read_seconds=options.read_timeout,
        write_seconds=options.write_timeout,
        request_seconds=options.timeout,
        grace_seconds=options.grace,
        max_connections=options.max_connections,
        requests_per_minute=options.max_requests_per_minute,
        tokens_per_minute=options.max_tokens_per_minute,
        tool_format=options.tool_format,
    )
    with contextlib.ExitStack() as stack:

        def open_places() -> tuple[socket.socket, RequestLog | None]:
            listener = stack.enter_context(listen(options.host, options.port))
            if options.log is None:
                return listener, None
            return listener, stack.enter_context(contextlib.closing(RequestLog(options.log)))

        # An address that is taken is told before the model is loaded. Of several processes, those that lead listen.
        places = None if options.distributed else open_places()
        lm = load_model(options)
        lm.tokenizer  # noqa: B018 - raises what is wrong with it
        if template is not None:
            use_chat_template(lm.tokenizer, template)
        # Answers name the weights; all processes have a part of these.
        lm.fingerprint  # noqa: B018
        engine = lm.engine(config, strategy=options.strategy)
        try:
            if not engine.leads:
                follow(engine)
                return 0
            listener, log = places or open_places()
            if log is not None and options.log_text:
                log.decode = lm.tokenizer.decode
            served = Served(lm, engine, server_options, options.strategy, log)
            logging.basicConfig(level=logging.WARNING)
            if not keys.are_needed and not is_local:
                _say("everybody who reaches this address may use it: add --api-key-file")
            Serving(served, listener).run(lambda address: _say(f"{name} on {address}"))
        finally:
            engine.close(cancel=True)
    return 0


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine (jaxinfer/engine/README.md explains each)")
    for field in dataclasses.fields(EngineConfig):
        kind: dict[str, Any] = {"type": positive_number if field.name in _DECIMALS else whole_number(1), "metavar": "N"}
        if field.name in _CHOICES:
            kind = {"choices": _CHOICES[field.name]}
        shown = "by the memory" if field.default is None else field.default
        group.add_argument(
            f"--{field.name.replace('_', '-')}", default=field.default, help=f"(default: {shown})", **kind
        )


def _name_of(model: str) -> str:
    """Return the name of a hub id, which is the id, or of a path: its last part without its ending."""
    path = Path(model)
    if path.exists() or model.count("/") != 1 or model.startswith((".", "~", "/")):
        path = path.resolve() if path.exists() else path
        return path.stem if path.suffix in (".gguf", ".bin") else path.name
    return model


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _say(line: str) -> None:
    # Whoever serves says so, not the first process alone.
    print(line, file=error_stream(), flush=True)
