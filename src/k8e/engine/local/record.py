"""The record of a sandbox, by which the next daemon finds the way back into it; and the ranges of ids in use."""

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

# Ids of native sandboxes on the machine: far above people and distributions, below 2^31, where signed readers trip.
_FIRST_ID = 0x30000000
_RANGES = (0x7FFF0000 - _FIRST_ID) // ID_COUNT


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    runtime: str
    image: str
    instance: str
    id_range: int | None  # the number of its range of ids on the machine; in the file it is called "slot"
    hostname: str
    ready: bool = True  # False while it is started again: what runs then cannot be used yet
    # Inodes of the machine's directories that are mounted in it: names are not enough, as a sandbox that can write
    # around one of them could have another directory mounted in its child, or in itself when it is started again.
    sources: tuple[int, ...] = ()
    slots: tuple[str, ...] = ()  # targets at which directories are still to be mounted

    def save(self, path: Path) -> None:
        fields = dataclasses.asdict(self)
        fields["slot"] = fields.pop("id_range")
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(fields))
        partial.rename(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Raises FileNotFoundError, or Damaged when it is not what was saved."""
        try:
            fields = json.loads(read_own(path))
            fields["id_range"] = fields.pop("slot")
            record = cls(**{**fields, **{name: tuple(fields.get(name, ())) for name in ("sources", "slots")}})
            bytes.fromhex(record.instance)
        except Damaged:
            raise
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise Damaged(f"it is no record of a sandbox: {error}") from error
        texts = (record.runtime, record.image, record.hostname, *record.slots)
        numbers = (*record.sources, *(() if record.id_range is None else (record.id_range,)))
        if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
            raise Damaged("it is no record of a sandbox: a value is of another kind")
        if record.ready not in (True, False) or not 0 <= (record.id_range or 0) < _RANGES:
            raise Damaged("it is no record of a sandbox: a value is out of range")
        return record

    @property
    def first_id(self) -> int | None:
        return None if self.id_range is None else _FIRST_ID + self.id_range * ID_COUNT


def all_sandboxes(layout: Layout) -> Iterator[SandboxPaths]:
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(layout.sandboxes):
            yield SandboxPaths(Path(entry))


def find_id_range(paths: SandboxPaths) -> int | None:
    """Works for a sandbox that is half made or half gone. One whose record is damaged may still run: then its disk is
    mounted, and the folder of the agent's socket there belongs to an id of its range."""
    with contextlib.suppress(FileNotFoundError, Damaged):
        return Record.load(paths.record).id_range
    with contextlib.suppress(OSError):
        id_range = (os.stat(paths.link, follow_symlinks=False).st_uid - _FIRST_ID) // ID_COUNT
        return id_range if 0 <= id_range < _RANGES else None
    return None


class Records:
    """The records of all sandboxes of an engine. One that is damaged is set aside and reported."""

    def __init__(self, layout: Layout, damages: Damages) -> None:
        self._layout = layout
        self._damages = damages

    def load(self, sandbox: str) -> Record:
        """Raises FileNotFoundError, also from the second time on that one is damaged."""
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

    def find_id_range(self, sandbox: str) -> int | None:
        paths = self._layout.sandbox(sandbox)
        try:
            return find_id_range(paths)
        except OSError as error:
            raise EngineError("record", f"{paths.record} cannot be read now: {error}") from error


class IdRanges:
    """Each native sandbox has a range of ids of its own on the machine."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._taken: set[int] | None = None

    def take(self) -> int:
        if self._taken is None:
            found = (find_id_range(paths) for paths in all_sandboxes(self._layout))
            self._taken = {id_range for id_range in found if id_range is not None}
        id_range = next((id_range for id_range in range(_RANGES) if id_range not in self._taken), None)
        if id_range is None:
            raise EngineError("user ids", f"all {_RANGES} ranges are in use")
        self._taken.add(id_range)
        return id_range

    def release(self, id_range: int | None) -> None:
        if id_range is not None and self._taken is not None:
            self._taken.discard(id_range)
