"""A registry over HTTP: requests, authentication, and redirects to where the bytes are.

HTTPS always, but for registries on this machine itself. Credentials go to the registry that they are for, and to the
place it names for tokens; never with a redirect. Everything that is parsed has a limit, every wait an end. The client
library is imported when the first image is pulled: it takes longer to load than a daemon to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

from k8e.engine import EngineError
from k8e.engine.images import Credentials
from k8e.engine.local.images import manifest as manifests
from k8e.engine.local.images.authentication import Challenge, parse_challenge, read_token, write_basic
from k8e.engine.local.images.limits import USUAL, ImageLimits
from k8e.engine.local.images.responses import (
    ATTEMPTS,
    PAUSE,
    Response,
    Transient,
    host_of,
    read_capped,
    read_pause,
    retry,
    unreachable,
)
from k8e.engine.reference import Reference, is_loopback
from k8e.policy.addresses import may_list

if TYPE_CHECKING:
    import httpx2

    from k8e.engine.local.images.transport import Clients

T = TypeVar("T")

_HUB: Final = ("docker.io", "registry-1.docker.io")
_ACCEPT: Final = ", ".join((*manifests.INDEX_TYPES, *manifests.MANIFEST_TYPES))
_REDIRECTS: Final = 5
_FIRST_ATTEMPTS: Final = 2  # to reach a registry at all
_TOKEN: Final = 1 << 20  # bytes of an answer with a token
_PORTION: Final = 256 << 10
_CONNECT, _SILENCE = 15.0, 60.0


def make_context(more: str) -> ssl.SSLContext:
    """Trusts the certificates that OpenSSL finds (SSL_CERT_FILE counts), and `more` in PEM."""
    context = ssl.create_default_context()
    if more:
        try:
            context.load_verify_locations(cadata=more)
        except ssl.SSLError as error:
            raise EngineError("image", f"the machine's certificates cannot be read: {error.reason}") from error
    return context


class Registry:
    """One repository, for one pull. `async with` it."""

    def __init__(
        self,
        reference: Reference,
        credentials: Credentials | None,
        context: ssl.SSLContext,
        limits: ImageLimits = USUAL,
        pause: float = PAUSE,
    ) -> None:
        self._reference = reference
        self._credentials = credentials
        self._context = context
        self._limits = limits
        self.pause = pause
        self._host = _HUB[1] if reference.host == _HUB[0] else reference.host
        self._origin = f"https://{self._host}"
        self._authorization = ""
        self._reached = False  # so far
        self._authorizing = asyncio.Lock()
        self._clients: Clients

    @property
    def host(self) -> str:
        return self._reference.host

    async def __aenter__(self) -> Registry:
        httpx2 = await asyncio.to_thread(_load_client)
        from k8e.engine.local.images.transport import Clients

        timeout = httpx2.Timeout(_SILENCE, connect=_CONNECT)
        self._clients = Clients(self._context, timeout, proxies=not self._reference.loopback)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clients.close()

    # Manifests and blobs

    async def manifest(self, what: str) -> tuple[str, str, bytes]:
        """By tag or digest: its digest, media type as announced, and content."""

        async def ask() -> tuple[str, str, bytes]:
            async with self._get(f"manifests/{what}", {"Accept": _ACCEPT}) as response:
                if response.status != 200:
                    raise self._explain(response.status)
                content = await read_capped(response, self._limits.manifest, "manifest")
                digest = manifests.digest_of(content)
                if what.startswith("sha256:") and digest != what:
                    raise EngineError("image", f"the registry's {what} is something else", reason="refused")
                media_type = response.headers.get("content-type", "").partition(";")[0].strip()
                return digest, media_type, content

        return await retry(ask, self.pause)

    async def small_blob(self, descriptor: manifests.Descriptor) -> bytes:
        """Something that is parsed."""

        async def ask() -> bytes:
            async with self._get(f"blobs/{descriptor.digest}", {}) as response:
                if response.status != 200:
                    raise self._explain(response.status)
                content = await read_capped(response, min(descriptor.size, self._limits.manifest), "configuration")
            if manifests.digest_of(content) != descriptor.digest:
                raise EngineError("image", f"the registry's {descriptor.digest} is something else", reason="refused")
            return content

        return await retry(ask, self.pause)

    @contextlib.asynccontextmanager
    async def blob(self, digest: str, offset: int) -> AsyncIterator[Response]:
        """From there to its end. 206: so it is; 200: from its beginning after all; 416: there is no such place."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        async with self._get(f"blobs/{digest}", headers) as response:
            if response.status not in (200, 206, 416):
                raise self._explain(response.status)
            yield response

    # Requests

    @contextlib.asynccontextmanager
    async def _get(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[Response]:
        """Raises Transient for errors that may pass."""
        async with contextlib.AsyncExitStack() as stack:
            used = self._authorization
            response = await self._send(stack, path, headers)
            if response.status == 401:
                await self._authorize(response.headers.get("www-authenticate", ""), used)
                response = await self._send(stack, path, headers)
            if response.status == 429:
                raise Transient(self._explain(429), read_pause(response.headers.get("retry-after", "")))
            if response.status >= 500:
                raise Transient(self._explain(response.status))
            yield response

    async def _send(self, stack: contextlib.AsyncExitStack, path: str, headers: Mapping[str, str]) -> Response:
        url = f"{self._origin}/v2/{self._reference.path}/{path}"
        try:
            return await self._follow(stack, url, headers)
        except _NotTls:
            self._origin = f"http://{self._host}"
            return await self._follow(stack, f"{self._origin}/v2/{self._reference.path}/{path}", headers)

    async def _follow(self, stack: contextlib.AsyncExitStack, url: str, headers: Mapping[str, str]) -> Response:
        for _ in range(_REDIRECTS):
            own = url.startswith(f"{self._origin}/")
            sent = {**headers, **({"Authorization": self._authorization} if own and self._authorization else {})}
            response = await stack.enter_async_context(self._request("GET", url, sent))
            if response.status not in (301, 302, 303, 307, 308):
                return response
            url = urljoin(url, response.headers.get("location", ""))
            self._check_address(url)
        raise EngineError("image", "the registry sends from one place to another", reason="unreachable")

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None = None
    ) -> AsyncIterator[Response]:
        httpx2 = _load_client()
        self._check_address(url)
        client = await self._clients.choose(url)
        try:
            content = urlencode(form).encode() if form is not None else None
            more = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
            request = client.build_request(method, url, headers={**headers, **more}, content=content)
            response = await client.send(request, stream=True)
            self._reached = True
        except httpx2.ConnectError as error:
            raise self._explain_connection(error, url) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError, ssl.SSLError, OSError) as error:
            raise self._not_reached(url, error) from error
        try:
            yield Response(response.status_code, response.headers, lambda: _pieces(httpx2, response, url))
        finally:
            await response.aclose()

    def _check_address(self, url: str) -> None:
        """A registry may redirect to other hosts over TLS, and not to addresses that only this machine can reach. The
        addresses of a name are judged when they are connected to (transport.py)."""
        parts = urlsplit(url)
        try:
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            host = ""
        local = is_loopback(host)
        if not host or parts.username or parts.scheme not in ("https", "http"):
            raise EngineError("image", "the registry sends to something that is no address", reason="refused")
        if (parts.scheme == "http" or local) and not (local and self._reference.loopback):
            what = "without TLS" if parts.scheme == "http" else "to this machine itself"
            raise EngineError("image", f"the registry sends {what}: {host}", reason="refused")
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host.partition("%")[0])
            if not local and not may_list(address):
                raise EngineError("image", f"images do not come from {address}", reason="refused")

    # Authentication

    async def _authorize(self, header: str, used: str) -> None:
        async with self._authorizing:
            if self._authorization != used:
                return  # another request was refused at the same moment, and has got a new one
            challenge = parse_challenge(header)
            if challenge is None:
                raise self._explain(401)
            if challenge.scheme == "basic":
                known = write_basic(self._credentials)
                if not known or known == used:
                    raise self._explain(401)
                self._authorization = known
            else:
                self._authorization = f"Bearer {await retry(lambda: self._get_token(challenge), self.pause)}"

    async def _get_token(self, challenge: Challenge) -> str:
        values = challenge.values
        wanted = {"service": values.get("service", "")}
        wanted["scope"] = values.get("scope") or f"repository:{self._reference.path}:pull"
        known = self._credentials
        async with contextlib.AsyncExitStack() as stack:
            if known is not None and known.identity_token:
                form = {**wanted, "grant_type": "refresh_token", "refresh_token": known.identity_token}
                request = self._request("POST", values["realm"], {}, {**form, "client_id": "k8e"})
            else:
                target = values["realm"] + ("&" if "?" in values["realm"] else "?") + urlencode(wanted)
                basic = write_basic(self._credentials)
                request = self._request("GET", target, {"Authorization": basic} if basic else {})
            response = await stack.enter_async_context(request)
            if response.status == 429 or response.status >= 500:
                raise Transient(self._explain(response.status), read_pause(response.headers.get("retry-after", "")))
            if response.status != 200:
                raise self._explain(401)
            content = await read_capped(response, _TOKEN, "token")
        return read_token(content)

    # Errors

    def _explain(self, status: int) -> EngineError:
        name, host = self._reference.short, self._reference.host
        known = self._credentials is not None
        if status in (401, 403):
            cause = f"{host} does not give {name} to " + (
                "these credentials" if known else "callers without credentials"
            )
            hint = "Is the name right? If the image is private: `docker login` (or `podman login`), and again."
            return EngineError("image", cause, hint, reason="unauthorized")
        if status == 404:
            hint = "Check the name and the tag."
            return EngineError("image", f"there is no {name} at {host}", hint, reason="not_found")
        if status == 429:
            hint = "Wait a while, or log in: registries give more to those they know."
            return EngineError("image", f"{host} gives nothing more for now (too many requests)", hint, "rate_limited")
        return EngineError("image", f"{host} answers with HTTP status {status}", reason="unreachable")

    def _explain_connection(self, error: Exception, url: str) -> Exception:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                text = f"the certificate of {host_of(url)} is not trusted: {cause.verify_message}"
                hint = "If it is your own registry: add its CA to the machine (update-ca-certificates, SSL_CERT_FILE)."
                return EngineError("image", text, hint, reason="untrusted")
            if isinstance(cause, ssl.SSLError):
                if self._reference.loopback and url.startswith("https:"):
                    return _NotTls()
                text = f"{host_of(url)} does not speak TLS as it should: {cause.reason or cause}"
                return EngineError("image", text, reason="unreachable")
            if isinstance(cause, ConnectionRefusedError) and self._reference.loopback:
                return unreachable(host_of(url), error)  # nothing listens there
            cause = cause.__cause__ or cause.__context__
        return self._not_reached(url, error)

    def _not_reached(self, url: str, error: Exception) -> Transient:
        """A registry that was never reached is tried less often than one that is gone for a moment."""
        attempts = ATTEMPTS if self._reached else _FIRST_ATTEMPTS
        return Transient(unreachable(host_of(url), error), attempts=attempts)


class _NotTls(Exception):
    """A registry on this machine that speaks plain HTTP."""


def _load_client() -> Any:
    import httpx2

    for name in ("httpx2", "httpcore2"):  # which would tell every address, and some have a signature in them
        logging.getLogger(name).setLevel(logging.WARNING)
    return httpx2


async def _pieces(httpx2: Any, response: httpx2.Response, url: str) -> AsyncIterator[bytes]:
    """In portions that are worth a thread's while; what came before a cut is given too."""
    portion = bytearray()
    failure: Exception | None = None
    try:
        async for piece in response.aiter_raw():
            portion += piece
            if len(portion) >= _PORTION:
                yield bytes(portion)
                portion.clear()
    except (httpx2.HTTPError, ssl.SSLError, OSError) as error:
        failure = error
    if portion:
        yield bytes(portion)
    if failure is not None:
        raise Transient(unreachable(host_of(url), failure)) from failure
