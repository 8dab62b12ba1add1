"""The server's description of itself, OpenAPI 3.1."""

from jaxinfer.server.openapi.document import describe

__all__ = ["describe"]
