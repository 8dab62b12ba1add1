"""A stand-in for the Hugging Face hub on the loopback interface."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """What the server holds and what it saw: ``revisions`` maps a branch to its files."""

    revisions: dict[str, dict[str, bytes]]
    repo_id: str = "someone/tiny"
    token: str | None = None
    gated: bool = False
    status: int | None = None
    endpoint: str = ""
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def commit(self, branch: str) -> str:
        return hashlib.sha1(branch.encode()).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.requests.append((f"{self.command} {self.path}", self.headers.get("Authorization")))
            if hub.status is not None:
                self._send(hub.status, b"{}")
            elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                code = "GatedRepo" if hub.gated else "RepoNotFound"
                self._send(403 if hub.gated else 401, b"{}", {"X-Error-Code": code})
            else:
                self._route([unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")])

        do_HEAD = do_GET

        def _route(self, parts: list[str]) -> None:
            if "/".join(parts[2:4]) == hub.repo_id and parts[:2] == ["api", "models"]:
                branch = self._branch(parts[5] if len(parts) > 5 else "main")
                if branch is not None:
                    self._describe(branch, tree=parts[4:5] == ["tree"])
            elif "/".join(parts[:2]) == hub.repo_id and parts[2] == "resolve":
                branch = self._branch(parts[3])
                if branch is not None:
                    content = hub.revisions[branch]["/".join(parts[4:])]
                    etag = hashlib.sha1(content).hexdigest()
                    self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit(branch)})
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _branch(self, revision: str) -> str | None:
            for branch in hub.revisions:
                if revision in (branch, hub.commit(branch)):
                    return branch
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None

        def _describe(self, branch: str, tree: bool) -> None:
            files = hub.revisions[branch]
            oid = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
            if tree:
                answer = [{"type": "file", "path": name, "size": len(files[name]), "oid": oid[name]} for name in files]
            else:
                siblings = [{"rfilename": name, "size": len(files[name]), "blobId": oid[name]} for name in files]
                answer = {"id": hub.repo_id, "sha": hub.commit(branch), "siblings": siblings}
            self._send(200, json.dumps(answer).encode())

        def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the block ends; sets ``hub.endpoint``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    server.block_on_close = False
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
