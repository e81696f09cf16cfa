"""The few requests that the engine makes of the Kubernetes API. Configuration, credentials and types are lightkube's;
the requests are ours, because its client deletes without preconditions and watches without bookmarks.

    ApiError
    ├── ApiUnreachable    no answer
    ├── ApiUnreadable     an answer that is not what was asked for
    └── ApiRefused        an answer that is no success; `code` is HTTP's
        └── VersionGone   410: what changed since that version is not known any more
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ConfigError
from lightkube.core.resource import GlobalResource, NamespacedResource, api_info
from lightkube.models.meta_v1 import ListMeta, ObjectMeta, Status

from k8e.engine import EngineError

T = TypeVar("T", bound=NamespacedResource)
G = TypeVar("G", bound=GlobalResource)
D = TypeVar("D")

_TIMEOUT: Final = httpx2.Timeout(10.0, read=30.0, pool=30.0)
_CONNECTIONS: Final = 64
_PAGE: Final = 500
_WATCH_LIFE: Final = 240  # seconds until the server ends a watch by itself
_SILENCE: Final = 150.0  # bookmarks come every minute: a watch without a word is a broken connection
_LATER: Final = (0.1, 0.3, 1.0)  # seconds to wait when the server asks for it (429): it has done nothing
_CONTROL: Final = "Kubernetes API"
_JSON_PATCH: Final = "application/json-patch+json"
_MERGE_PATCH: Final = "application/strategic-merge-patch+json"


class ApiError(EngineError):
    pass


class ApiUnreachable(ApiError):
    pass


class ApiUnreadable(ApiError):
    pass


class ApiRefused(ApiError):
    def __init__(self, code: int, cause: str, hint: str = "") -> None:
        super().__init__(_CONTROL, cause, hint)
        self.code = code


class VersionGone(ApiRefused):
    pass


class _Page(msgspec.Struct, Generic[T]):
    items: list[T]
    metadata: ListMeta


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    """Has the kind of what is watched, and nothing of it but a version: what is required there is null here."""

    metadata: ObjectMeta


class Api:
    """One namespace of a cluster."""

    def __init__(self, namespace: str, kubeconfig: Path | None = None) -> None:
        """Reads the configuration: the file, or what a pod of the cluster is given, or KUBECONFIG."""
        self.namespace = namespace
        # Called before each request that changes something; raises when nothing may be changed.
        self.guard: Callable[[], None] = lambda: None
        try:
            found = (KubeConfig.from_file(kubeconfig) if kubeconfig is not None else KubeConfig.from_env()).get()
        except (ConfigError, OSError, KeyError, ValueError) as error:
            hint = "name a file by [kubernetes] kubeconfig or KUBECONFIG, or run the gateway in the cluster"
            raise ApiUnreachable(_CONTROL, f"its configuration cannot be used: {error}", hint) from error
        assert found is not None, "without a default it raises"
        self._config = found
        self._opened: httpx2.AsyncClient | None = None

    @property
    def _client(self) -> httpx2.AsyncClient:
        """Made when it is first wanted: it belongs to the loop that runs then."""
        if self._opened is None:
            self._opened = AsyncClient(self._config, ConnectionParams(timeout=_TIMEOUT))
        return self._opened

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()
            self._opened = None

    # One object ------------------------------------------------------------------------------------------------------

    async def get(self, kind: type[T], name: str) -> T | None:
        try:
            return _decode(await self._send("GET", self._path(kind, name)), kind)
        except ApiRefused as refused:
            if refused.code == 404:
                return None
            raise

    async def create(self, thing: T, *, dry_run: bool = False) -> T:
        """Creates it; `dry_run`: only asks whether it would be admitted."""
        content, query = msgspec.json.encode(thing), {"dryRun": "All"} if dry_run else None
        return _decode(await self._send("POST", self._path(type(thing)), content, query=query), type(thing))

    async def create_global(self, thing: G) -> G:
        content = msgspec.json.encode(thing)
        return _decode(await self._send("POST", _base(type(thing)), content), type(thing))

    async def fetch(self, path: str) -> bytes | None:
        """Returns what the server has at a path; None: nothing."""
        try:
            return await self._send("GET", path)
        except ApiRefused as refused:
            if refused.code == 404:
                return None
            raise

    async def replace(self, thing: T) -> T:
        """Writes the whole object. ApiRefused (409) when it has another version than `thing` by now."""
        meta: ObjectMeta | None = getattr(thing, "metadata", None)
        assert meta is not None
        assert meta.name
        content = msgspec.json.encode(thing)
        return _decode(await self._send("PUT", self._path(type(thing), meta.name), content), type(thing))

    async def delete(
        self,
        kind: type[T],
        name: str,
        uid: str,
        *,
        version: str = "",
        grace: int | None = None,
        foreground: bool = False,
    ) -> bool:
        """Deletes that very object, never another one that has its name by now; with a version, only if it still has
        that. False: it is not there. `foreground`: it is there until all that belongs to it is gone."""
        conditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": conditions}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if foreground:
            options["propagationPolicy"] = "Foreground"
        try:
            await self._send("DELETE", self._path(kind, name), msgspec.json.encode(options))
        except ApiRefused as refused:
            if refused.code in (404, 409):  # 409: that one is gone, and another has its name
                return False
            raise
        return True

    async def patch(self, kind: type[T], name: str, operations: Sequence[Mapping[str, Any]]) -> T:
        content = msgspec.json.encode(operations)
        return _decode(await self._send("PATCH", self._path(kind, name), content, content_type=_JSON_PATCH), kind)

    async def merge_status(self, kind: type[T], name: str, change: Mapping[str, Any]) -> T:
        """Conditions are merged by their type. A uid in the change is a precondition."""
        content = msgspec.json.encode(change)
        path = f"{self._path(kind, name)}/status"
        return _decode(await self._send("PATCH", path, content, content_type=_MERGE_PATCH), kind)

    async def serves(self, group: str, version: str) -> bool:
        """Whether the cluster knows objects of that group in that version."""
        try:
            await self._send("GET", f"/apis/{group}/{version}")
        except ApiRefused as refused:
            if refused.code == 404:
                return False
            raise
        return True

    # Many ------------------------------------------------------------------------------------------------------------

    async def list(self, kind: type[T], selector: str = "", fields: str = "") -> tuple[Sequence[T], str]:
        """All of them as they are now, and the version to watch them from."""
        items: list[T] = []
        query = {"labelSelector": selector, "fieldSelector": fields, "limit": str(_PAGE)}
        while True:
            content = await self._send("GET", self._path(kind), query=query)
            page = _decode(content, _Page[kind])  # type: ignore[valid-type]
            items += page.items
            if not page.metadata.continue_:
                return items, page.metadata.resourceVersion or ""
            query["continue"] = page.metadata.continue_

    async def list_global(self, kind: type[G]) -> Sequence[G]:
        page = _decode(await self._send("GET", _base(kind)), _Page[kind])  # type: ignore[valid-type]
        return page.items

    async def watch(
        self, kind: type[T], version: str, selector: str = "", fields: str = ""
    ) -> AsyncGenerator[tuple[str, T], None]:
        """Yields what changes after that version, until the server ends the watch. VersionGone: it is not known."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "labelSelector": selector,
            "fieldSelector": fields,
            "timeoutSeconds": str(_WATCH_LIFE),
        }
        request = self._client.build_request("GET", self._path(kind), params=query, timeout=_patient())
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code >= 400:
                    raise _refuse(response.status_code, await response.aread())
                lines = response.aiter_lines()
                while True:
                    async with asyncio.timeout(_SILENCE):
                        line = await anext(lines, "")
                    if not line:
                        return
                    yield read_event(line, kind)
            finally:
                await response.aclose()
        except (httpx2.HTTPError, OSError, TimeoutError) as error:
            raise _lose(error) from error

    # -----------------------------------------------------------------------------------------------------------------

    def _path(self, kind: type[NamespacedResource], name: str = "") -> str:
        return _base(kind, self.namespace) + (f"/{name}" if name else "")

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        headers = {"Content-Type": content_type} if content is not None else {}
        pauses = iter(_LATER)
        while True:
            if method != "GET":
                self.guard()
            try:
                response = await self._client.request(method, path, content=content, params=query, headers=headers)
            except (httpx2.HTTPError, OSError, ConfigError) as error:
                raise _lose(error) from error
            if response.status_code != 429 or (pause := next(pauses, None)) is None:
                break
            await asyncio.sleep(pause)
        if response.status_code >= 400:
            raise _refuse(response.status_code, response.content)
        return response.content


def read_event(line: str, kind: type[T]) -> tuple[str, T]:
    """Reads a line of a watch. VersionGone when it says that what is wanted is not known any more."""
    event = _decode(line, _Event)
    if event.type == "ERROR":
        raise _refuse(0, bytes(event.object))
    if event.type == "BOOKMARK":
        make: Callable[..., T] = kind
        return event.type, make(metadata=_decode(event.object, _Bookmark).metadata)
    return event.type, _decode(event.object, kind)


def _decode(content: bytes | str | msgspec.Raw, kind: type[D]) -> D:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise ApiUnreadable(_CONTROL, f"its answer cannot be read: {error}") from error


def _base(kind: type[Any], namespace: str = "") -> str:
    info = api_info(kind)
    group = f"/apis/{info.resource.group}" if info.resource.group else "/api"
    inside = f"/namespaces/{namespace}" if namespace else ""
    return f"{group}/{info.resource.version}{inside}/{info.plural}"


def _patient() -> httpx2.Timeout:
    return httpx2.Timeout(10.0, read=None)


def _lose(error: Exception) -> ApiUnreachable:
    cause = str(error) or type(error).__name__
    return ApiUnreachable(_CONTROL, f"it does not answer: {cause}", "sandboxes that run go on; try again in a moment")


def _refuse(code: int, content: bytes) -> ApiRefused:
    try:
        status = msgspec.json.decode(content, type=Status)
    except msgspec.MsgspecError:
        status = Status(message=content[:200].decode(errors="replace"), code=code)
    code = status.code or code
    cause = status.message or status.reason or f"HTTP status {code}"
    if code == 410:
        return VersionGone(code, cause)
    hint = ""
    if code == 403 and "forbidden" in cause.lower():
        hint = "docs/kubernetes.md has the rights that the gateway's account needs, and what admission may refuse"
    elif code == 401:
        hint = "the gateway's credentials were not accepted: see to its kubeconfig or service account"
    return ApiRefused(code, cause, hint)
