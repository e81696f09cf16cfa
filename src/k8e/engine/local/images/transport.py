"""The way to a registry: the address that was checked is the address that is connected to.

A name is resolved once for each connection, here; its addresses are judged, and one of those very addresses is
connected to, so that a name server cannot give one answer to the check and another to the connection. TLS and
the Host header go by the name, as ever. A proxy resolves names itself: who configured it decides what it reaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

import httpcore2
import httpx2

from k8e.engine import EngineError
from k8e.engine.reference import is_loopback
from k8e.policy.addresses import Address, may_list

_FIRST_TRY: Final = 3.0  # seconds for an address, while there is another one to try


def judge_address(host: str, address: Address) -> None:
    if not may_list(address):
        cause = f"{host} is an address that images do not come from: {address}"
        raise EngineError("image", cause, reason="refused")


async def resolve(host: str, port: int) -> list[Address]:
    """In the machine's order of preference, all of them judged. OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found]
    if is_loopback(host):
        # Names of this machine itself: whether they may be used was decided before; they have no other addresses.
        return [address for address in addresses if address.is_loopback]
    for address in addresses:
        judge_address(host, address)
    return addresses


class PinnedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that it has judged, and to no others."""

    def __init__(self) -> None:
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        deadline = time.monotonic() + (timeout or 3600.0)
        try:
            async with asyncio.timeout(timeout):
                addresses = await resolve(host, port)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(f"{host} was not resolved in time") from error
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for number, address in enumerate(addresses, 1):
            left = max(0.1, deadline - time.monotonic())
            patience = left if number == len(addresses) else min(left, _FIRST_TRY)
            try:
                return await self._network.connect_tcp(str(address), port, patience, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class PinnedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(verify=context, trust_env=False)
        assert isinstance(self._pool, httpcore2.AsyncConnectionPool), "the library keeps its connections elsewhere"
        self._pool = httpcore2.AsyncConnectionPool(ssl_context=context, network_backend=PinnedBackend())


class Clients:
    """For one pull: straight to the host of a URL, or through the proxy of the daemon's environment."""

    def __init__(self, context: ssl.SSLContext, timeout: httpx2.Timeout, *, proxies: bool) -> None:
        self._context = context
        self._settings: dict[str, Any] = {
            "timeout": timeout,
            "follow_redirects": False,
            "trust_env": False,
            "headers": {"User-Agent": "k8e", "Accept-Encoding": "identity"},
        }
        self._proxies = proxies  # those of the environment; they know nothing of our loopback
        self._straight = httpx2.AsyncClient(transport=PinnedTransport(context), **self._settings)
        self._through: dict[str, httpx2.AsyncClient] = {}

    async def close(self) -> None:
        for client in (self._straight, *self._through.values()):
            await client.aclose()

    async def choose(self, url: str) -> httpx2.AsyncClient:
        proxy = self._find_proxy(url)
        if not proxy:
            return self._straight
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 443
        with contextlib.suppress(OSError):  # the proxy may know it
            await resolve(host, port)
        if proxy not in self._through:
            self._through[proxy] = httpx2.AsyncClient(proxy=proxy, verify=self._context, **self._settings)
        return self._through[proxy]

    def _find_proxy(self, url: str) -> str:
        parts = urlsplit(url)
        if not self._proxies or urllib.request.proxy_bypass(parts.hostname or ""):
            return ""
        known = urllib.request.getproxies()
        proxy = known.get(parts.scheme) or known.get("all") or ""
        return proxy if not proxy or "://" in proxy else f"http://{proxy}"
