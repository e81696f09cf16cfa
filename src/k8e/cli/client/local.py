"""The service over HTTP, on the unix socket of this machine's daemon (docs/http-api.md)."""

from __future__ import annotations

from k8e.cli.client import Answer
from k8e.cli.client.http import BYTES, JSON, Connection, connect, pack, quote, send_patiently
from k8e.cli.client.response import Response, nonsense

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from k8e.cli.client import SessionName
    from k8e.cli.client.service import Wanted

    Show = Callable[[dict[str, Any]], None]

STDOUT, STDERR, STARTED, RESULT, ERROR, PROGRESS = 1, 2, 4, 5, 6, 7  # kinds of frames


class LocalClient:
    """Sends one request after the other on one connection. No request is sent twice."""

    place = endpoint = ""

    def __init__(self) -> None:
        self._connection = Connection()

    def status(self) -> Answer:
        return self._get("/v1/status")

    # Sessions

    def create_session(self, wanted: Wanted) -> Answer:
        return self._post("/v1/sessions", wanted)

    def create_child(self, parent: SessionName, wanted: Wanted) -> Answer:
        return self._post(locate(parent, "/subagents"), wanted)

    def list_sessions(self, phase: str, tenant_id: str = "", owner: str = "") -> Answer:
        return self._get(add_query("/v1/sessions", phase=phase, tenant_id=tenant_id, owner=owner))

    def get_session(self, session: SessionName) -> Answer:
        return self._get(locate(session))

    def stop_session(self, session: SessionName) -> Answer:
        return self._post(locate(session, "/stop"))

    def start_session(self, session: SessionName, wanted: Wanted) -> Answer:
        return self._post(locate(session, "/start"), wanted)

    def destroy_session(self, session: SessionName) -> Answer:
        return read_answer(self._connection.request("DELETE", locate(session)))

    def get_hosts(self, session: SessionName) -> Answer:
        return self._get(locate(session, "/hosts"))

    def change_hosts(self, session: SessionName, change: Wanted) -> Answer:
        return self._post(locate(session, "/hosts"), change)

    # Runs

    def run(self, session: SessionName, wanted: Wanted, stdin: bytes = b"") -> Answer:
        if stdin:
            from binascii import b2a_base64

            wanted = {**wanted, "stdin_base64": b2a_base64(stdin, newline=False).decode("ascii")}
        return self._post(locate(session, "/runs"), wanted)

    def stream_run(self, session: SessionName, wanted: Wanted, *, feeds: bool) -> LocalStream:
        return self._stream(locate(session, "/runs"), wanted, feeds=feeds)

    def stream_once(self, wanted: Wanted, *, feeds: bool) -> LocalStream:
        """In a one-command session."""
        return self._stream("/v1/runs", wanted, feeds=feeds)

    def get_run(self, run_id: str) -> Answer:
        return self._get(f"/v1/runs/{quote(run_id)}")

    def kill_run(self, run_id: str) -> Answer:
        return self._post(f"/v1/runs/{quote(run_id)}/kill")

    def signal_run(self, run_id: str, number: int) -> Answer:
        return self._post(f"/v1/runs/{quote(run_id)}/signal", {"signal": number})

    def resize_run(self, run_id: str, rows: int, columns: int) -> Answer:
        return self._post(f"/v1/runs/{quote(run_id)}/resize", {"rows": rows, "columns": columns})

    def list_runs(self, session: SessionName) -> Answer:
        return self._get(locate(session, "/runs"))

    def list_processes(self, session: SessionName) -> Answer:
        return self._get(locate(session, "/processes"))

    # Files

    def read_file(self, session: SessionName, path: str) -> Answer:
        return read_answer(self._connection.request("GET", locate(session, "/files", path=path), accept=JSON))

    def read_bytes(self, session: SessionName, path: str) -> bytes:
        response = self._connection.request("GET", locate(session, "/files", path=path), accept=BYTES)
        return check(response).read()

    def write_file(self, session: SessionName, path: str, content: bytes, mode: str) -> Answer:
        target = locate(session, "/files", path=path, mode=mode)
        return read_answer(self._connection.request("PUT", target, content, BYTES))

    def list_files(self, session: SessionName, path: str, since: float) -> Answer:
        return self._get(locate(session, "/entries", path=path, since=repr(since)))

    # Files and directories of any size

    def get_tree(self, session: SessionName, path: str) -> Answer:
        return self._get(locate(session, "/tree", path=path))

    def create_directory(self, session: SessionName, path: str) -> Answer:
        return read_answer(self._connection.request("PUT", locate(session, "/folder", path=path), b"", BYTES))

    def read_pieces(self, session: SessionName, path: str) -> Iterator[bytes]:
        return check(self._connection.request("GET", locate(session, "/content", path=path))).pieces()

    def write_pieces(self, session: SessionName, path: str, pieces: Iterable[bytes], permissions: int) -> Answer:
        target = locate(session, "/content", path=path, permissions=f"{permissions:o}")
        return read_answer(self._connection.send("PUT", target, pieces, BYTES))

    # Approvals

    def request_approval(self, session: SessionName, action: str, timeout: float | None) -> Answer:
        wanted = {"action": action} if timeout is None else {"action": action, "timeout": timeout}
        return self._post(locate(session, "/approvals"), wanted)

    def get_approval(self, approval_id: str, wait: float = 0) -> Answer:
        return self._get(add_query(f"/v1/approvals/{quote(approval_id)}", wait=f"{wait:.3f}" if wait else ""))

    def list_approvals(self, status: str) -> Answer:
        return self._get(add_query("/v1/approvals", status=status))

    def answer_approval(self, approval_id: str, reason: str, *, approved: bool) -> Answer:
        return self._post(f"/v1/approvals/{quote(approval_id)}", {"approved": approved, "reason": reason})

    # Images. `show` is called with each report of progress.

    def list_images(self) -> Answer:
        return self._get("/v1/images")

    def pull_image(self, wanted: Wanted, show: Show) -> Answer:
        import json  # a password is text of its own, and no argument

        body = json.dumps(wanted).encode()
        return follow(self._connection.request("POST", "/v1/images/pull", body, JSON), show)

    def import_image(self, name: str, tenant_id: str, archive: Iterable[bytes], show: Show) -> Answer:
        target = add_query("/v1/images/import", name=name, tenant_id=tenant_id)
        return follow(self._connection.send("POST", target, archive, BYTES), show)

    def build_base(self, show: Show) -> Answer:
        return follow(self._connection.request("POST", "/v1/images/base", b"{}", JSON), show)

    def remove_image(self, name: str, tenant_id: str) -> Answer:
        target = add_query("/v1/images", name=name, tenant_id=tenant_id)
        return read_answer(self._connection.request("DELETE", target))

    def prune_images(self, unused_for: float, tenant_id: str) -> Answer:
        return self._post("/v1/images/prune", {"unused_for": unused_for, "tenant_id": tenant_id})

    # API keys, certificates, the pool

    def create_key(self, wanted: Wanted) -> Answer:
        return self._post("/v1/keys", wanted)

    def list_keys(self) -> Answer:
        return self._get("/v1/keys")

    def delete_key(self, name: str) -> Answer:
        return read_answer(self._connection.request("DELETE", f"/v1/keys/{quote(name)}"))

    def log_in(self, csr: str) -> Answer:
        return self._post("/v1/login", {"csr": csr})

    def get_pool(self) -> Answer:
        return self._get("/v1/pool")

    def reserve(self, wanted: Wanted) -> Answer:
        return self._post("/v1/pool", wanted)

    def listen_mcp(self, wanted: Wanted) -> Iterator[bytes]:
        """Yields what the daemon writes while it listens for AI agents; the daemon stops when this connection ends."""
        return check(self._connection.request("POST", "/v1/mcp/listen", pack(wanted).encode("ascii"), JSON)).pieces()

    def _get(self, target: str) -> Answer:
        return read_answer(self._connection.request("GET", target))

    def _post(self, target: str, wanted: Wanted | None = None) -> Answer:
        return read_answer(self._connection.request("POST", target, pack(wanted or {}).encode("ascii"), JSON))

    def _stream(self, target: str, wanted: Wanted, *, feeds: bool) -> LocalStream:
        if feeds:
            response = self._connection.upload(target, pack(wanted).encode("ascii"))
        else:
            body = pack({**wanted, "stream": True}).encode("ascii")
            response = self._connection.request("POST", target, body, JSON)
        return LocalStream(check(response), self._connection)


class LocalStream:
    def __init__(self, response: Response, connection: Connection) -> None:
        self.response = response
        self._connection = connection
        self._frames = response.frames()
        self._result = b""
        kind, data = next(self._frames, (0, b""))
        if kind != STARTED:
            raise nonsense("a run that has not started")
        self.run_id, self.session_id = find_text(data, b"run_id"), find_text(data, b"session_id")

    @property
    def result(self) -> Answer:
        return Answer(self._result, self.response.exit_code)

    def output(self) -> Iterator[tuple[int, bytes]]:
        for kind, data in self._frames:
            if kind in (STDOUT, STDERR):
                yield kind, data
            elif kind == RESULT:
                self._result = data
            elif kind == ERROR:
                from k8e.cli.client.failures import read_error

                raise read_error(data)
        if not self._result:
            raise nonsense("a run without a result")

    def feed(self, descriptor: int) -> None:
        self._connection.feed(descriptor)


def open_mcp(cwd: str, home: str, tenant_id: str, front: str) -> socket:
    """A connection on which an AI agent's messages follow in chunks, and the daemon's in the answer."""
    target = add_query("/v1/mcp", cwd=cwd, home=home, tenant_id=tenant_id, front=front, answers="1")
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    connection = connect()
    send_patiently(connection, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode("ascii"))
    return connection


def locate(session: SessionName, part: str = "", **query: str) -> str:
    target = f"/v1/sessions/{quote(session.session_id)}{part}"
    return add_query(target, **query, tenant_id=session.tenant_id, owner=session.owner)


def add_query(target: str, **query: str) -> str:
    """Values that are empty say nothing, and are left out."""
    words = "&".join(f"{name}={quote(value)}" for name, value in query.items() if value)
    return f"{target}?{words}" if words else target


def check(response: Response) -> Response:
    """Raises the error that the daemon answered."""
    if response.status < 300:
        return response
    from k8e.cli.client.failures import read_error

    raise read_error(response.read())


def read_answer(response: Response) -> Answer:
    """Looks at both ends of the text only: to parse all of it takes longer than everything else."""
    text = check(response).read()
    if text.startswith(b"{") and text.endswith(b"}\n"):
        return Answer(text, response.exit_code)
    raise nonsense(f"{text[:64]!r} is no JSON object")


def follow(response: Response, show: Show) -> Answer:
    from k8e.cli.client.failures import lost, parse_object, read_error

    result: Answer | None = None
    for kind, data in check(response).frames():
        if kind == PROGRESS:
            show(parse_object(data))
        elif kind == ERROR:
            raise read_error(data)
        elif kind == RESULT:
            result = Answer(data)
    if result is None:
        raise lost()
    return result


def find_text(content: bytes, name: bytes) -> str:
    """A member of an object that the daemon wrote, whose value needs no escapes."""
    return content.partition(b'"%b": "' % name)[2].partition(b'"')[0].decode("ascii", "replace")
