"""What a server is told once."""

from dataclasses import dataclass, field

from jaxinfer.server.http.keys import Keys


@dataclass(frozen=True)
class ServerOptions:
    """How a server meets its clients; times are in seconds.

    ``model`` is the name that requests have to give. Without keys, a server that ``is_local`` answers only to names of
    this machine. A body of more than ``max_body_bytes`` is refused. A client has
    ``read_seconds`` to send a head, and again a body, and ``write_seconds`` to read on where it has stopped. A request
    that takes longer than ``request_seconds`` ends. ``grace_seconds`` is how long requests may go on after a signal to
    end. More than ``max_connections`` are refused. Each key (without keys, all clients together) has so many requests
    and tokens a minute; None is any number. ``tool_format`` is how the model writes calls of functions, "auto" for what
    its chat template says.
    """

    model: str
    keys: Keys = field(default_factory=Keys)
    is_local: bool = True
    max_body_bytes: int = 4 << 20
    read_seconds: float = 30.0
    write_seconds: float = 30.0
    request_seconds: float = 600.0
    grace_seconds: float = 30.0
    max_connections: int = 1024
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tool_format: str = "auto"
