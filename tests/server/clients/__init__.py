"""Other projects' clients against a running server, outside of pytest: ``python -m tests.server.clients.NAME URL``."""
