"""Clients of the service: a command calls methods of one client, and prints what they return.

service.py has the methods that every client has. The client of this machine's daemon stands here and speaks HTTP on its
unix socket (docs/http-api.md; http.py, response.py, streams.py, failures.py, launch.py). ../remote/ speaks gRPC to a
gateway. Neither protocol is imported before it is needed.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from k8e.cli.client.response import Response
    from k8e.cli.client.service import Service, Wanted
    from k8e.cli.client.streams import LocalPort, LocalStream, LocalTerminal

    Show = Callable[[dict[str, Any]], None]

# Any of them means a gateway and not the daemon of this machine. Options become variables (commands.py).
_NAMES = ("ENDPOINT", "PROFILE", "APIKEY", "CERT", "KEY", "TOKEN_FILE")
GATEWAY_VARIABLES = tuple(f"K8E_SANDBOX_{name}" for name in _NAMES)
LOCAL = "local"  # as the endpoint: the daemon of this machine all the same
JSON = "application/json"
BYTES = "application/octet-stream"
PATIENCE = 30.0  # seconds; a daemon that has said nothing for so long, though it was asked twice, is silent
has_daemon = True  # the standalone program knows gateways only


class SessionName:
    """A session as the caller names it: by its id, and by tenant and owner where several sessions have that id."""

    def __init__(self, session_id: str, tenant_id: str = "", owner: str = "") -> None:
        self.session_id = session_id
        self.tenant_id = tenant_id
        self.owner = owner


class Answer:
    """One JSON object from the service: commands print its text, and parse it only when they need a member.
    `exit_code` is the command's, if the object is the result of a run; None is unknown, which is never success."""

    def __init__(self, text: bytes, exit_code: int | None = None) -> None:
        self.text = text
        self.exit_code = exit_code

    @property
    def reason(self) -> str:
        """Why a run was ended, where that was not the command's own doing nor its caller's; else empty."""
        return str(self.parse().get("reason", "")) if b'"reason": "' in self.text else ""

    def parse(self) -> dict[str, Any]:
        from k8e.cli.client.failures import parse_object

        return parse_object(self.text)


def find_patience() -> float:
    """K8E_PATIENCE is for slow machines, and for tests."""
    try:
        return max(float(os.environ.get("K8E_PATIENCE") or PATIENCE), 0.1)
    except ValueError:
        return PATIENCE


def run_dir() -> str:
    return os.environ.get("K8E_RUN_DIR") or "/run/k8e"


def open_client() -> Service:
    """A client of the gateway that was named, else of this machine's daemon, else of the gateway that `k8e connect`
    stored last, else of the daemon, which is then started."""
    profile = find_gateway()
    if profile is None:
        if not has_daemon:
            from k8e.cli.client.failures import no_gateway

            raise no_gateway()
        return LocalClient()
    from k8e.cli.remote.client import RemoteClient
    from k8e.cli.remote.discovery import find_target

    return RemoteClient(find_target(profile))


def find_gateway() -> str | None:
    """The connection profile of the gateway that is meant; empty: variables name it. None: this machine's daemon."""
    named = [name for name in GATEWAY_VARIABLES if os.environ.get(name)]
    if named == ["K8E_SANDBOX_ENDPOINT"] and os.environ["K8E_SANDBOX_ENDPOINT"] == LOCAL:
        return None
    if named:
        return ""
    local = has_daemon and os.path.exists(run_dir() + "/k8e.sock")
    if local or not os.path.exists(os.path.expanduser("~/.k8e/sandbox/profiles.yaml")):
        return None
    from k8e.cli.remote.profiles import Profiles

    return Profiles().current or None


class LocalClient:
    """Sends one request after the other on one connection. No request is sent twice. `meanwhile`: see Connection."""

    place = endpoint = ""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        from k8e.cli.client.http import Connection

        self._connection = Connection(meanwhile)

    def status(self) -> Answer:
        return self._get("/v1/status")

    # Sessions

    def create_session(self, wanted: Wanted) -> Answer:
        return self._post("/v1/sessions", wanted)

    def create_child(self, parent: SessionName, wanted: Wanted) -> Answer:
        return self._post(locate(parent, "/subagents"), wanted)

    def list_sessions(self, phase: str, tenant_id: str = "", owner: str = "", *, load: bool = False) -> Answer:
        wanted = "1" if load else ""
        return self._get(add_query("/v1/sessions", phase=phase, load=wanted, tenant_id=tenant_id, owner=owner))

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

    def open_terminal(self, session: SessionName, wanted: Wanted) -> LocalTerminal:
        from k8e.cli.client.streams import LocalTerminal

        response = self._connection.upload(locate(session, "/terminals"), wanted)
        return LocalTerminal(check(response), self._connection)

    def get_run(self, run_id: str, stdout_from: int = 0, stderr_from: int = 0, wait: float = 0) -> Answer:
        seen = {"stdout_from": str(stdout_from or ""), "stderr_from": str(stderr_from or "")}
        return self._get(add_query(f"/v1/runs/{quote(run_id)}", **seen, wait=f"{wait:g}" if wait else ""))

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

    def read_file(self, session: SessionName, path: str, offset: int = 0, length: int | None = None) -> Answer:
        target = locate(session, "/files", path=path, **name_part(offset, length))
        return read_answer(self._connection.request("GET", target, accept=JSON))

    def write_file(self, session: SessionName, path: str, content: bytes, mode: str) -> Answer:
        target = locate(session, "/files", path=path, mode=mode)
        return read_answer(self._connection.request("PUT", target, content, BYTES))

    def list_files(self, session: SessionName, path: str, since: float) -> Answer:
        return self._get(locate(session, "/entries", path=path, since=repr(since)))

    def connect_port(self, session: SessionName, port: int) -> LocalPort:
        from k8e.cli.client.streams import LocalPort

        response = self._connection.begin(locate(session, f"/ports/{port}"))
        return LocalPort(check(response), self._connection)

    # Files and directories of any size

    def get_tree(self, session: SessionName, path: str, *, below: bool = True) -> Answer:
        return self._get(locate(session, "/tree", path=path, below="" if below else "0"))

    def create_directory(self, session: SessionName, path: str) -> Answer:
        return read_answer(self._connection.request("PUT", locate(session, "/folder", path=path), b"", BYTES))

    def remove_file(self, session: SessionName, path: str, *, recursive: bool) -> Answer:
        target = locate(session, "/files", path=path, recursive="1" if recursive else "")
        return read_answer(self._connection.request("DELETE", target))

    def read_pieces(
        self, session: SessionName, path: str, offset: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        target = locate(session, "/content", path=path, **name_part(offset, length))
        return check(self._connection.request("GET", target)).pieces()

    def write_pieces(
        self,
        session: SessionName,
        path: str,
        pieces: Iterable[bytes],
        permissions: int | None = None,
        mode: str = "w",
    ) -> Answer:
        octal = "" if permissions is None else f"{permissions:o}"
        target = locate(session, "/content", path=path, mode=mode, permissions=octal)
        return read_answer(self._connection.send("PUT", target, pieces, BYTES))

    # Approvals

    def request_approval(self, session: SessionName, action: str, timeout: float | None) -> Answer:
        wanted = {"action": action} if timeout is None else {"action": action, "timeout": timeout}
        return self._post(locate(session, "/approvals"), wanted)

    def get_approval(self, approval_id: str, wait: float = 0) -> Answer:
        return self._get(add_query(f"/v1/approvals/{quote(approval_id)}", wait=f"{wait:.3f}" if wait else ""))

    def list_approvals(self, status: str) -> Answer:
        return self._get(add_query("/v1/approvals", status=status))

    def check_approval(self, approval_id: str) -> Answer:
        return self._get(add_query(f"/v1/approvals/{quote(approval_id)}", may_answer="1"))

    def answer_approval(self, approval_id: str, reason: str, *, approved: bool) -> Answer:
        return self._post(f"/v1/approvals/{quote(approval_id)}", {"approved": approved, "reason": reason})

    # Images. `show` is called with each report of progress.

    def list_images(self) -> Answer:
        return self._get("/v1/images")

    def pull_image(self, wanted: Wanted, show: Show) -> Answer:
        import json  # a password is text of its own, and no argument

        body = json.dumps(wanted).encode()
        return self._follow(self._connection.request("POST", "/v1/images/pull", body, JSON), show)

    def import_image(self, name: str, tenant_id: str, archive: Iterable[bytes], show: Show) -> Answer:
        target = add_query("/v1/images/import", name=name, tenant_id=tenant_id)
        return self._follow(self._connection.send("POST", target, archive, BYTES), show)

    def build_base(self, show: Show) -> Answer:
        return self._follow(self._connection.post("/v1/images/base", {}), show)

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
        return check(self._connection.post("/v1/mcp/listen", wanted)).pieces()

    def _get(self, target: str) -> Answer:
        return read_answer(self._connection.request("GET", target))

    def _post(self, target: str, wanted: Wanted | None = None) -> Answer:
        return read_answer(self._connection.post(target, wanted or {}))

    def _follow(self, response: Response, show: Show) -> Answer:
        from k8e.cli.client.streams import follow

        return follow(check(response), show)

    def _stream(self, target: str, wanted: Wanted, *, feeds: bool) -> LocalStream:
        from k8e.cli.client.streams import LocalStream

        connection = self._connection
        response = connection.upload(target, wanted) if feeds else connection.post(target, {**wanted, "stream": True})
        return LocalStream(check(response), self._connection)


def locate(session: SessionName, part: str = "", **query: str) -> str:
    target = f"/v1/sessions/{quote(session.session_id)}{part}"
    return add_query(target, **query, tenant_id=session.tenant_id, owner=session.owner)


def name_part(offset: int, length: int | None) -> dict[str, str]:
    return {"offset": str(offset) if offset else "", "length": "" if length is None else str(length)}


def quote(text: str) -> str:
    """For a path or query: everything but what needs no quoting anywhere."""
    plain = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    return "".join(chr(byte) if byte in plain else f"%{byte:02X}" for byte in os.fsencode(text))


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
    from k8e.cli.client.response import nonsense

    raise nonsense(f"{text[:64]!r} is no JSON object")
