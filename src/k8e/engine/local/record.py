"""What must outlive the daemon to find the way back into a sandbox, and which host ids are taken by those that live."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from k8e.damage import Damaged, Damages, read_own
from k8e.engine import EngineError
from k8e.engine.local.layout import Layout, SandboxPaths
from k8e.engine.local.runtime.bundle import ID_COUNT

# Host ids of native sandboxes: far above people and distributions, below 2^31 where signed readers would trip.
_FIRST_ID = 0x30000000
_SLOTS = (0x7FFF0000 - _FIRST_ID) // ID_COUNT


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    runtime: str
    image: str
    instance: str
    slot: int | None
    hostname: str
    ready: bool = True  # False while it is started again: what runs then is nothing that anybody could use
    # Inodes of the machine's directories that are shown in it: by their names a sandbox that can write around one of
    # them could have another shown to a child of its, or to itself when it is started again.
    sources: tuple[int, ...] = ()
    slots: tuple[str, ...] = ()  # where directories are still to be shown

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(dataclasses.asdict(self)))
        partial.rename(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        """FileNotFoundError, or Damaged when it is not what was saved."""
        try:
            fields = json.loads(read_own(path))
            record = cls(**{**fields, **{name: tuple(fields.get(name, ())) for name in ("sources", "slots")}})
            bytes.fromhex(record.instance)
        except Damaged:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise Damaged(f"it is no record of a sandbox: {error}") from error
        texts = (record.runtime, record.image, record.hostname, *record.slots)
        numbers = (*record.sources, *(() if record.slot is None else (record.slot,)))
        if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
            raise Damaged("it is no record of a sandbox: a value is of another kind")
        if record.ready not in (True, False) or not 0 <= (record.slot or 0) < _SLOTS:
            raise Damaged("it is no record of a sandbox: a value is out of range")
        return record

    @property
    def first_id(self) -> int | None:
        return None if self.slot is None else _FIRST_ID + self.slot * ID_COUNT


def all_sandboxes(layout: Layout) -> Iterator[SandboxPaths]:
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(layout.sandboxes):
            yield SandboxPaths(Path(entry))


def find_slot(paths: SandboxPaths) -> int | None:
    """Of a sandbox that may be half made or half gone. One whose record is damaged may still run: then its disk is
    mounted, and the folder of the agent's socket there belongs to an id of its range."""
    with contextlib.suppress(FileNotFoundError, Damaged):
        return Record.load(paths.record).slot
    with contextlib.suppress(OSError):
        slot = (os.stat(paths.link, follow_symlinks=False).st_uid - _FIRST_ID) // ID_COUNT
        return slot if 0 <= slot < _SLOTS else None
    return None


class Records:
    """Of all sandboxes of an engine. One that is damaged is set aside and told."""

    def __init__(self, layout: Layout, damages: Damages) -> None:
        self._layout = layout
        self._damages = damages

    def load(self, sandbox: str) -> Record:
        """FileNotFoundError, also from the second time on that one is damaged."""
        path = self._layout.sandbox(sandbox).record
        try:
            return Record.load(path)
        except Damaged as error:
            self._damages.set_aside(path, error)
            raise EngineError("record", f"what was known of {sandbox} is damaged: {error}") from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise EngineError("record", f"what is known of {sandbox} cannot be read now: {error}") from error

    def find_slot(self, sandbox: str) -> int | None:
        paths = self._layout.sandbox(sandbox)
        try:
            return find_slot(paths)
        except OSError as error:
            raise EngineError("record", f"{paths.record} cannot be read now: {error}") from error


class IdRanges:
    """Each native sandbox has a range of host ids of its own."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._taken: set[int] | None = None

    def take(self) -> int:
        if self._taken is None:
            slots = (find_slot(paths) for paths in all_sandboxes(self._layout))
            self._taken = {slot for slot in slots if slot is not None}
        slot = next((slot for slot in range(_SLOTS) if slot not in self._taken), None)
        if slot is None:
            raise EngineError("user ids", f"all {_SLOTS} ranges are in use")
        self._taken.add(slot)
        return slot

    def release(self, slot: int | None) -> None:
        if slot is not None and self._taken is not None:
            self._taken.discard(slot)
