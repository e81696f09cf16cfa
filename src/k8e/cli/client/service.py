"""The contract between commands and clients; imported by type checkers only.

Texts are as Python decodes arguments and file names: a client sends the bytes that the user typed. `wanted` is an
object with the members of the request in docs/http-api.md. Every method raises ServiceError when the service refuses,
and Failure when the service cannot be reached or does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from k8e.cli.client import Answer, SessionName

Wanted = Mapping[str, Any]


class Trees(Protocol):
    """Directories, and files of any size."""

    def get_tree(self, session: SessionName, path: str, *, below: bool = True) -> Answer:
        """The entry at the path, with everything below it unless that is not wanted."""

    def create_directory(self, session: SessionName, path: str) -> Answer: ...
    def read_pieces(
        self, session: SessionName, path: str, offset: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        """Raises ServiceError before the first piece where the file cannot be read."""

    def write_pieces(
        self,
        session: SessionName,
        path: str,
        pieces: Iterable[bytes],
        permissions: int | None = None,
        mode: str = "w",
    ) -> Answer: ...


class Service(Trees, Protocol):
    place: str  # a name for files about this service; empty for this machine's daemon
    endpoint: str  # of the gateway; empty for this machine's daemon

    def status(self) -> Answer: ...

    # Sessions
    def create_session(self, wanted: Wanted) -> Answer: ...
    def create_child(self, parent: SessionName, wanted: Wanted) -> Answer: ...
    def list_sessions(self, phase: str, tenant_id: str = "", owner: str = "", *, load: bool = False) -> Answer: ...
    def get_session(self, session: SessionName) -> Answer: ...
    def stop_session(self, session: SessionName) -> Answer: ...
    def start_session(self, session: SessionName, wanted: Wanted) -> Answer: ...
    def destroy_session(self, session: SessionName) -> Answer: ...
    def get_hosts(self, session: SessionName) -> Answer: ...
    def change_hosts(self, session: SessionName, change: Wanted) -> Answer: ...

    # Runs
    def run(self, session: SessionName, wanted: Wanted, stdin: bytes) -> Answer: ...
    def stream_run(self, session: SessionName, wanted: Wanted, *, feeds: bool) -> RunStream: ...
    def get_run(self, run_id: str, stdout_from: int = 0, stderr_from: int = 0, wait: float = 0) -> Answer: ...
    def kill_run(self, run_id: str) -> Answer: ...
    def list_runs(self, session: SessionName) -> Answer: ...
    def open_terminal(self, session: SessionName, wanted: Wanted) -> TerminalStream: ...
    def list_processes(self, session: SessionName) -> Answer: ...

    # Files
    def read_file(self, session: SessionName, path: str, offset: int = 0, length: int | None = None) -> Answer: ...
    def write_file(self, session: SessionName, path: str, content: bytes, mode: str) -> Answer: ...
    def list_files(self, session: SessionName, path: str, since: float) -> Answer: ...

    def remove_file(self, session: SessionName, path: str, *, recursive: bool) -> Answer: ...

    # Approvals
    def request_approval(self, session: SessionName, action: str, timeout: float | None) -> Answer: ...
    def get_approval(self, approval_id: str, wait: float = 0) -> Answer: ...
    def list_approvals(self, status: str) -> Answer: ...
    def check_approval(self, approval_id: str) -> Answer:
        """The approval, if this caller may answer it."""

    def answer_approval(self, approval_id: str, reason: str, *, approved: bool) -> Answer: ...

    # Images and API keys
    def list_images(self) -> Answer: ...
    def create_key(self, wanted: Wanted) -> Answer: ...
    def list_keys(self) -> Answer: ...
    def delete_key(self, name: str) -> Answer: ...


class RunStream(Protocol):
    """A foreground run whose output arrives while it runs."""

    run_id: str
    session_id: str

    @property
    def result(self) -> Answer:
        """Known after the output has ended."""

    def output(self) -> Iterator[tuple[int, bytes]]:
        """Yields (1 for stdout or 2 for stderr, bytes) until the run has ended."""

    def feed(self, descriptor: int) -> None:
        """Sends what can be read there as the command's stdin, to its end. Called in a thread of its own."""


class TerminalStream(Protocol):
    """A terminal in a sandbox that the user is at. One thread calls `write` and `close`, another one the rest."""

    run_id: str
    resumed: bool  # it was there before
    started: float
    others: list[str]  # terminals of the session at which other clients are

    @property
    def result(self) -> Answer:
        """Known after the output has ended."""

    def output(self) -> Iterator[bytes]:
        """Yields what is shown, until the command has ended. Raises Failure when the terminal is lost or left."""

    def heed_signals(self) -> None:
        """From now on signals are handled while `output` waits."""

    def write(self, keys: bytes) -> None: ...
    def resize(self, rows: int, columns: int) -> None: ...
    def close(self) -> None:
        """Leaves the command running."""
