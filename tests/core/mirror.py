"""Mirrors for stores of tests: what one store keeps there is there for the next one.

`TEST_STORE=mirrored` runs all tests of core that do not look at the database's file on a mirrored store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from k8e.core.store.contents import Content
from k8e.core.store.mirrored import MirroredStore
from k8e.core.store.store import Store
from k8e.engine import EngineError


class MemoryMirror:
    """One that can be away."""

    def __init__(self) -> None:
        self.contents: dict[str, str] = {}
        self.writes: list[str] = []  # names
        self.away = False
        self.deaf = False  # it takes what is written, and its answer is lost
        self.open = asyncio.Event()  # writes wait for it
        self.open.set()

    async def load(self) -> Sequence[tuple[str, Content]]:
        if self.away:
            raise EngineError("mirror", "it is away")
        return [(name, json.loads(content)) for name, content in self.contents.items()]

    async def write(self, name: str, content: Content | None) -> None:
        await self.open.wait()
        self.writes.append(name)
        if not self.away:
            if content is None:
                self.contents.pop(name, None)
            else:
                self.contents[name] = json.dumps(content)
        if self.away or self.deaf:
            raise EngineError("mirror", "it is away")

    async def close(self) -> None: ...


class FolderMirror:
    """Outlives the process that writes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def load(self) -> Sequence[tuple[str, Content]]:
        self._folder.mkdir(exist_ok=True)
        found = [json.loads(path.read_text()) for path in self._folder.glob("*.json")]
        return [(name, content) for name, content in found]

    async def write(self, name: str, content: Content | None) -> None:
        path = self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
        await asyncio.sleep(0)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            draft = path.with_suffix(".new")
            draft.write_text(json.dumps([name, content]))
            draft.rename(path)

    async def close(self) -> None: ...


async def open_store(folder: Path) -> Store:
    """As the tests are to run: on a file, or mirrored."""
    if os.environ.get("TEST_STORE") == "mirrored":
        return await MirroredStore.load(FolderMirror(folder / "records"))
    return await Store.open(folder / "state.db")
