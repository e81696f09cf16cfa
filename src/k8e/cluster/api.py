"""Small requests to an API server, while a cluster starts and as long as k8e looks after it. Engines have a client of
their own."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

Question = Callable[[], Awaitable[bool]]

_INTERVAL: Final = 0.05  # between two questions


async def becomes_true(question: Question, patience: float, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Asks until the answer is yes, the time is over, or a further question is useless."""
    end = time.monotonic() + patience
    while not await question():
        if time.monotonic() > end or is_over():
            return False
        await asyncio.sleep(_INTERVAL)
    return True


class Api:
    """`authority` is a file or PEM text. The files are read for each request: a renewed certificate is used at once."""

    def __init__(self, server: str, authority: Path | str, certificate: Path | None = None, *, token: str = "") -> None:
        self._address = urlsplit(server).netloc
        self._authority = authority
        self._certificate = certificate
        self._token = token

    async def get(self, path: str) -> tuple[int, bytes] | None:
        """Returns the status and the body; None when there is no server (yet)."""
        return await self.request("GET", path)

    async def request(
        self, method: str, path: str, body: object = None, kind: str = "application/json"
    ) -> tuple[int, bytes] | None:
        """Does the same for any method. None may also mean that the answer was lost."""
        return await asyncio.to_thread(self._request, method, path, body, kind)

    def read_lines(self, method: str, path: str, body: object, patience: float) -> Iterator[bytes]:
        """Yields the lines of a long answer. Blocking, for a thread; OSError and HTTPException when it is not one."""
        connection = http.client.HTTPSConnection(self._address, context=self._open_context(), timeout=patience)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(f"it answers {answer.status}")
            yield from answer
        finally:
            connection.close()

    def is_served(self, path: str) -> Question:
        """Returns the question whether the path answers with 200."""

        async def ask() -> bool:
            answer = await self.get(path)
            return answer is not None and answer[0] == http.client.OK

        return ask

    def has_condition(self, path: str, *conditions: str) -> Question:
        """Returns the question whether these conditions of the object at the path are true."""

        async def ask() -> bool:
            answer = await self.get(path)
            if answer is None or answer[0] != http.client.OK:
                return False
            status: dict[str, Any] = json.loads(answer[1]).get("status") or {}
            # A CRD that was made a moment ago has them, but as null.
            found: list[dict[str, Any]] = status.get("conditions") or []
            true = {each["type"] for each in found if each["status"] == "True"}
            return true.issuperset(conditions)

        return ask

    def _request(self, method: str, path: str, body: object, kind: str) -> tuple[int, bytes] | None:
        connection = None
        try:
            connection = http.client.HTTPSConnection(self._address, context=self._open_context(), timeout=10)
            headers = {"Content-Type": kind}
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            if connection is not None:
                connection.close()

    def _open_context(self) -> ssl.SSLContext:
        if isinstance(self._authority, Path):
            context = ssl.create_default_context(cafile=str(self._authority))
        else:
            context = ssl.create_default_context(cadata=self._authority)
        if self._certificate is not None:
            context.load_cert_chain(self._certificate)
        return context
