"""Sandboxes whose root is an image: its layers below, seen by all and written by none, a layer of their own above."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from k8e.engine.images import Image
from tests.engine.rig import Rig, Room
from tests.engine.tiny_images import add_image, enter_image


@pytest.fixture(scope="module")
async def image(rig: Rig) -> Image:
    return await add_image(rig.engine, Env=["PATH=/bin", "COLOUR=green"], WorkingDir="/srv/app")


@pytest.fixture(scope="module")
async def room(rig: Rig, image: Image) -> AsyncIterator[Room]:
    async with enter_image(rig, image) as room:
        yield room


async def test_it_begins_as_the_image_says(room: Room) -> None:
    told = await room.output("sh", "-c", "id -u; pwd; echo $COLOUR $HOME $PATH; cat /etc/hostname; ls /usr")
    assert told == "0\n/srv/app\ngreen /root /bin\nsandbox\n"
