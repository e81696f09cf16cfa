"""One copy between this machine and a sandbox: what it is about, what it has copied, and what it had to leave out."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.client import SessionName
    from k8e.cli.client.service import Trees

PIECE = 256 << 10


class Transfer:
    def __init__(self, client: Trees, session: SessionName, path: str) -> None:
        """`path` is the one in the sandbox."""
        self.files = 0
        self.bytes = 0
        self.left_out: list[tuple[str, str]] = []  # name and reason
        self._client = client
        self._session = session
        self._path = path

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out.append((name, reason))


def split_place(text: str) -> tuple[str, str]:
    """(sandbox, path); no sandbox: it is here. ./a:b is a file of this machine."""
    name, colon, path = text.partition(":")
    if not colon or not name or "/" in name:
        return "", text
    return name, path or "."
