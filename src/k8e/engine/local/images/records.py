"""The records of images and of their layers, as files: read with suspicion, written whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from k8e.damage import Damaged, Damages, read_own
from k8e.engine.local.layout import Layout

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_HEX: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NO_LOCK: Final = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class StoredLayer:
    size: int
    entries: int
    whole: bool  # nothing below it is seen
    boot: str  # during which it was written


@dataclass(frozen=True, slots=True)
class StoredImage:
    digest: str
    layers: tuple[str, ...]  # hex, lowest first
    env: tuple[tuple[str, str], ...] = ()
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    made: float = field(default=0.0, compare=False)

    @classmethod
    def load(cls, path: Path) -> StoredImage:
        """FileNotFoundError, or Damaged when it is not what was saved."""
        try:
            value: dict[str, Any] = json.loads(read_own(path))
            value["env"] = tuple((name, text) for name, text in value["env"])
            for key in ("layers", "entrypoint", "command", "names"):
                value[key] = tuple(value[key])
            record = cls(**value)
            if not all(_HEX.fullmatch(layer) for layer in record.layers) or not isinstance(record.made, int | float):
                raise Damaged("it is no record of an image")
            return record
        except Damaged:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Damaged(f"it is no record of an image: {error}") from error


class Records:
    """Of one store."""

    def __init__(self, layout: Layout, damages: Damages) -> None:
        self._layout = layout
        self._damages = damages

    @property
    def images(self) -> Path:
        return self._layout.oci / "images"

    def image_path(self, digest: str) -> Path:
        return self.images / f"{digest.removeprefix('sha256:')}.json"

    def layer_path(self, diff_id: str) -> Path:
        return self._layout.oci / "layers" / f"{diff_id}.json"

    def layer(self, diff_id: str) -> StoredLayer:
        """FileNotFoundError, also when it is damaged: a layer without a record cannot be relied on."""
        path = self.layer_path(diff_id)
        try:
            record = StoredLayer(**json.loads(read_own(path)))
            if type(record.size) is int and isinstance(record.whole, bool):
                return record
            raise Damaged("it is no record of a layer")
        except (ValueError, TypeError) as error:
            self._damages.set_aside(path, error)
            raise FileNotFoundError(path) from error

    def find(self, digest: str) -> StoredImage | None:
        return self._read(self.image_path(digest)) if _DIGEST.fullmatch(digest) else None

    def all(self) -> Sequence[StoredImage]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            found = [self._read(path) for path in self.images.glob("*.json")]
        return [record for record in found if record is not None]

    def _read(self, path: Path) -> StoredImage | None:
        """None also of an image that is not whole any more: its record is damaged, or that of one of its layers. It
        has to be fetched again."""
        try:
            record = StoredImage.load(path)
            for layer in record.layers:
                self.layer(layer)
            return record
        except FileNotFoundError as error:
            if path.exists():
                self._damages.set_aside(path, f"a layer of it is not on record: {error}")
        except Damaged as error:
            self._damages.set_aside(path, error)
        return None


def write_whole(path: Path, text: str, lock: contextlib.AbstractContextManager[object] = _NO_LOCK) -> None:
    """All of it or nothing, whatever happens. The lock is held while it gets its name, and not while a disk is slow."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    with lock:
        draft.rename(path)
