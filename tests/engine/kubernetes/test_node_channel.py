"""The channel between a gateway and a node's helper, over real sockets: only the two that were meant talk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from k8e.engine import EngineError, Refusal
from k8e.engine.kubernetes.names import gateway_label
from k8e.engine.kubernetes.node.reports import Reports
from k8e.engine.kubernetes.node_channel import ChannelBroken, HelperLinks, dial
from k8e.link.noise import GatewayKey

GATEWAY, OTHER, HELPER = (GatewayKey.generate() for _ in range(3))
REFUSED = Refusal("other.com", "", 0, "name_not_listed", 1.5)
MANY = [Refusal(f"{number}.example.com" * 10, "192.0.2.1", number, "name_not_listed", 1.5) for number in range(900)]


def answer(label: str, uid: str) -> Sequence[Refusal]:
    """Each gateway has one pod, which has its label as a uid."""
    if uid == "many":
        return MANY
    if uid != label:
        raise EngineError("pod", "there is none of that gateway here")
    return [REFUSED]


@contextlib.asynccontextmanager
async def helper(*gateways: GatewayKey) -> AsyncIterator[int]:
    reports = Reports(HELPER, lambda: {gateway_label(each.public): each.public for each in gateways}, answer)
    try:
        yield await reports.start("127.0.0.1", 0)
    finally:
        await reports.close()


async def ask(port: int, own: GatewayKey, uid: str, helper: GatewayKey = HELPER) -> object:
    links = HelperLinks(own)
    try:
        async with asyncio.timeout(10):
            return await links.ask("127.0.0.1", port, helper.public.hex(), {"refusals": uid})
    finally:
        links.close()


async def test_each_gateway_hears_of_its_own() -> None:
    async with helper(GATEWAY, OTHER) as port:
        for own, another in ((GATEWAY, OTHER), (OTHER, GATEWAY)):
            told = await ask(port, own, gateway_label(own.public))
            assert told == {"refusals": [["other.com", "", 0, "name_not_listed", 1.5]]}
            assert await ask(port, own, gateway_label(another.public)) == {
                "error": "pod: there is none of that gateway here"
            }


async def test_more_than_a_record_holds() -> None:
    async with helper(GATEWAY) as port:
        told = await ask(port, GATEWAY, "many")
    assert isinstance(told, dict)
    assert len(told["refusals"]) == len(MANY)


async def test_a_channel_is_kept_and_made_again() -> None:
    links, uid = HelperLinks(GATEWAY), gateway_label(GATEWAY.public)
    async with helper(GATEWAY) as port:
        for _ in range(3):
            assert "refusals" in await links.ask("127.0.0.1", port, HELPER.public.hex(), {"refusals": uid})
    reports = Reports(HELPER, lambda: {uid: GATEWAY.public}, answer)  # the next helper, at the same place
    await reports.start("127.0.0.1", port)
    try:
        assert "refusals" in await links.ask("127.0.0.1", port, HELPER.public.hex(), {"refusals": uid})
    finally:
        links.close()
        await reports.close()


async def test_a_gateway_that_the_helper_does_not_know() -> None:
    async with helper(GATEWAY) as port:
        with pytest.raises((ChannelBroken, OSError)):
            await ask(port, OTHER, "any")


async def test_a_gateway_by_label_only() -> None:
    """Labels are public, keys are not."""
    async with helper(GATEWAY) as port:
        pretender = GatewayKey.generate()
        pretender.public = GATEWAY.public
        with pytest.raises((ChannelBroken, OSError)):
            await ask(port, pretender, "any")


async def test_another_helper_than_the_cluster_names() -> None:
    async with helper(GATEWAY) as port:
        with pytest.raises(ChannelBroken, match="not the helper"):
            await ask(port, GATEWAY, "any", helper=OTHER)


@pytest.mark.parametrize("noise", [b"", b"\0", b"\xff" * 70_000, b"\x30\x00" + b"x" * 48, b"GET / HTTP/1.0\r\n\r\n"])
async def test_noise_ends_its_own_connection_only(noise: bytes) -> None:
    async with helper(GATEWAY) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError):
            writer.write(noise)
            writer.write_eof()
            async with asyncio.timeout(10):
                assert await reader.read() == b""
        writer.close()
        assert "refusals" in str(await ask(port, GATEWAY, gateway_label(GATEWAY.public)))


@pytest.mark.parametrize("question", [None, [], {"refusals": 7}, {"other": "x"}])
async def test_not_a_question(question: object) -> None:
    async with helper(GATEWAY) as port:
        channel = await dial("127.0.0.1", port, GATEWAY, HELPER.public)
        await channel.send(question)
        assert await channel.receive(1000) == {"error": "not a question"}
        channel.close()
