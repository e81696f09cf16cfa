"""Where images lie: layers as directories in overlayfs' own form, each once, and a record of each image.

`<state>/layers/<hex>` is the layer whose uncompressed archive has that sha256, ready to be a lower directory: what it
removes is a character device 0:0, what it replaces has the attribute trusted.overlay.opaque. `<state>/oci` has the
records, and what is under way. A name appears when everything behind it is complete; what a crash leaves has another
one, and the next start removes it.

Nobody but root may walk into these directories: in them lie setuid programs that are a stranger's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from k8e.damage import Damaged, Damages, own_directory, read_own
from k8e.engine.images import Image
from k8e.engine.local.images.layers import Unpacked, sync_filesystem
from k8e.engine.local.images.manifest import Configuration
from k8e.engine.local.layout import Layout
from k8e.engine.local.record import Record, all_sandboxes

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_HEX: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_STALE: Final = 7 * 86_400.0  # seconds after which nobody goes on with half a download
_FRESH: Final = 10.0  # seconds
_NO_LOCK: Final = contextlib.nullcontext()
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class LayerRecord:
    size: int
    entries: int
    whole: bool  # nothing below it is seen
    boot: str  # during which it was written


@dataclass(frozen=True, slots=True)
class ImageRecord:
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
    def load(cls, path: Path) -> ImageRecord:
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


class Store:
    """Synchronous, and safe to use from several threads."""

    def __init__(self, layout: Layout, fresh: float = _FRESH, damages: Damages | None = None) -> None:
        self._layout = layout
        self._damages = damages or Damages(layout.state)
        self._lock = threading.Lock()
        self._fresh_for = fresh
        self._fresh: dict[str, float] = {}  # images that nobody had the time to name yet
        self._wanted: Counter[str] = Counter()  # layers that an image under way is going to need

    # Asking

    def find(self, digest: str) -> Image | None:
        record = self._load(digest)
        return None if record is None else self._show(record)

    def claim(self, digest: str) -> Image | None:
        """As `find`, and what is found stays for a while: somebody is about to name it."""
        with self._lock:
            image = self.find(digest)
            if image is not None:
                self._fresh[digest] = time.monotonic()
        return image

    def layers_of(self, digest: str) -> tuple[Path, ...]:
        """Lowest first. Of a layer that occurs twice the upper one is as good as both; KeyError when there is no such
        image (any more)."""
        record = self._load(digest)
        if record is None:
            raise KeyError(digest)
        chosen: list[str] = []
        for layer in reversed(record.layers):
            if layer not in chosen:
                chosen.append(layer)
            if self._layer_record(layer).whole:
                break
        return tuple(self.layer(layer) for layer in reversed(chosen))

    def list(self) -> Sequence[Image]:
        return [self._show(record) for record in sorted(self._records(), key=lambda record: record.made)]

    def layer(self, diff_id: str) -> Path:
        return self._layout.layers / diff_id

    def has_layer(self, diff_id: str) -> bool:
        return self.layer(diff_id).is_dir()

    # Keeping

    @contextlib.contextmanager
    def wanting(self, diff_ids: Collection[str]) -> Iterator[None]:
        """Until the end nobody removes these, though no image has them yet."""
        with self._lock:
            self._wanted.update(diff_ids)
        try:
            yield
        finally:
            with self._lock:
                self._wanted.subtract(diff_ids)
                self._wanted = +self._wanted

    @contextlib.contextmanager
    def new_layer(self) -> Iterator[Path]:
        """An empty directory, until `keep_layer` gives it its name; gone after the block otherwise."""
        self.prepare()
        top = Path(tempfile.mkdtemp(prefix=".new-", dir=self._layout.layers))
        content = top / "content"
        content.mkdir()
        content.chmod(0o755)
        try:
            yield content
        finally:
            shutil.rmtree(top, ignore_errors=True)

    def keep_layer(self, content: Path, made: Unpacked) -> None:
        """Somebody may have been faster, with the same."""
        record = LayerRecord(made.size, made.entries, made.whole, BOOT.read_text().strip())
        write_whole(self._layer_note(made.diff_id), json.dumps(asdict(record)))
        with contextlib.suppress(FileExistsError, OSError):
            content.rename(self.layer(made.diff_id))
        if not self.has_layer(made.diff_id):
            raise OSError(f"{self.layer(made.diff_id)} cannot be made")

    def keep_image(self, digest: str, configuration: Configuration, names: tuple[str, ...] = ()) -> Image:
        """All of its layers are here."""
        self.prepare()
        sync_filesystem(self._layout.layers)
        with self._lock:
            self._fresh[digest] = time.monotonic()
        record = ImageRecord(
            digest,
            configuration.diff_ids,
            configuration.env,
            configuration.user,
            configuration.workdir,
            configuration.entrypoint,
            configuration.command,
            names,
            time.time(),
        )
        write_whole(self._record(digest), json.dumps(asdict(record)), self._lock)
        return self._show(record)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory of our own, gone afterwards."""
        self.prepare()
        with tempfile.TemporaryDirectory(
            prefix="work-", dir=self._layout.oci / "work", ignore_cleanup_errors=True
        ) as top:
            yield Path(top)

    @property
    def partial(self) -> Path:
        """Where downloads wait for their other half, by digest."""
        return self._layout.oci / "partial"

    # Clearing up

    def prepare(self) -> None:
        for path in (self._layout.layers, self._layout.oci, *(self._layout.oci / name for name in _FOLDERS)):
            own_directory(path, 0o700, self._damages)

    def clean(self) -> None:
        """What an earlier daemon left half done. Only when nothing is under way."""
        self.prepare()
        for left in (*self._layout.layers.glob(".*"), *(self._layout.oci / "work").iterdir()):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        for left in self.partial.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE:
                    left.unlink()
        for folder in (self._images, self._layout.oci / "layers"):
            for left in folder.glob(".*"):
                left.unlink(missing_ok=True)
        self.restore()
        records = self._records()
        boot, used = BOOT.read_text().strip(), {layer for record in records for layer in record.layers}
        if self._misses_one(records):
            return
        for path in self._layout.layers.iterdir():
            if path.name in used:
                continue
            # Of an image that was never complete. Written before the machine went down, it may be hollow.
            if not self._layer_note(path.name).exists() or self._layer_record(path.name).boot != boot:
                self._remove_layer(path.name)

    def restore(self) -> None:
        """Images that were being removed when a daemon died. Whether they are in use is asked again; until then they
        are, since a sandbox may be."""
        for gone in self._images.glob("*.gone"):
            gone.rename(gone.with_suffix(".json"))

    def retain(self, digests: Collection[str]) -> int:
        """Removes every other image, but for those of sandboxes that exist. Returns bytes.

        A sandbox is on record before its layers are asked for, and an image is set aside before the records are read:
        of two that meet, one sees the other.
        """
        self.prepare()
        with self._lock:
            oldest = time.monotonic() - self._fresh_for
            self._fresh = {digest: at for digest, at in self._fresh.items() if at > oldest}
            used = self._in_use()
            if "" in used:
                raise OSError("the record of a sandbox cannot be read: what it is made of is not known")
            keep = set(digests) | used | set(self._fresh)
            aside = [record for record in self._records() if record.digest not in keep]
            for record in aside:
                self._record(record.digest).rename(self._record(record.digest).with_suffix(".gone"))
        used = self._in_use()
        for record in aside:
            gone = self._record(record.digest).with_suffix(".gone")
            if record.digest in used:
                gone.rename(self._record(record.digest))
            else:
                gone.unlink(missing_ok=True)
        return self._sweep()

    def _sweep(self) -> int:
        """Layers that no image has, nor one under way is going to have; and what was downloaded for nobody."""
        freed, old = 0, []
        with self._lock:
            records = self._records()
            used = {layer for record in records for layer in record.layers} | set(self._wanted)
            for path in () if self._misses_one(records) else self._layout.layers.iterdir():
                if not path.name.startswith(".") and path.name not in used:
                    aside = path.with_name(f".old-{path.name}")
                    path.rename(aside)
                    old.append((path.name, aside))
            idle = not self._wanted
        for name, aside in old:
            with contextlib.suppress(FileNotFoundError):
                freed += self._layer_record(name).size
            self._layer_note(name).unlink(missing_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
        for left in self.partial.iterdir() if idle else ():
            with contextlib.suppress(FileNotFoundError):
                if not is_locked(left):
                    freed += left.stat().st_size
                    left.unlink()
        return freed

    def _misses_one(self, records: Sequence[ImageRecord]) -> bool:
        """Whether a sandbox is made of an image that is not on record (any more): any layer may be under it."""
        return bool(self._in_use() - {record.digest for record in records} - {"host"})

    def _remove_layer(self, diff_id: str) -> None:
        shutil.rmtree(self.layer(diff_id), ignore_errors=True)
        self._layer_note(diff_id).unlink(missing_ok=True)

    def _in_use(self) -> set[str]:
        """What sandboxes are made of; with one that does not say, its record being damaged, also what no image is."""
        found = set()
        for paths in list(all_sandboxes(self._layout)):
            try:
                found.add(Record.load(paths.record).image)
            except (FileNotFoundError, NotADirectoryError):
                continue  # half made, and so made of nothing yet; or gone
            except (Damaged, OSError):
                found.add("")
        return found

    # Files

    @property
    def _images(self) -> Path:
        return self._layout.oci / "images"

    def _record(self, digest: str) -> Path:
        return self._images / f"{digest.removeprefix('sha256:')}.json"

    def _layer_note(self, diff_id: str) -> Path:
        return self._layout.oci / "layers" / f"{diff_id}.json"

    def _layer_record(self, diff_id: str) -> LayerRecord:
        """FileNotFoundError, also when it is damaged: without it a layer is none that could be relied on."""
        path = self._layer_note(diff_id)
        try:
            record = LayerRecord(**json.loads(read_own(path)))
            if type(record.size) is int and isinstance(record.whole, bool):
                return record
            raise Damaged("it is no record of a layer")
        except (ValueError, TypeError) as error:
            self._damages.set_aside(path, error)
            raise FileNotFoundError(path) from error

    def _load(self, digest: str) -> ImageRecord | None:
        if not _DIGEST.fullmatch(digest):
            return None
        return self._read(self._record(digest))

    def _read(self, path: Path) -> ImageRecord | None:
        """None also of an image that is not whole any more: its record is damaged, or that of one of its layers. It
        has to be fetched again."""
        try:
            record = ImageRecord.load(path)
            for layer in record.layers:
                self._layer_record(layer)
            return record
        except FileNotFoundError as error:
            if path.exists():
                self._damages.set_aside(path, f"a layer of it is not on record: {error}")
        except Damaged as error:
            self._damages.set_aside(path, error)
        return None

    def _records(self) -> Sequence[ImageRecord]:
        found = []
        with contextlib.suppress(FileNotFoundError):
            found = [self._read(path) for path in self._images.glob("*.json")]
        return [record for record in found if record is not None]

    def _show(self, record: ImageRecord) -> Image:
        size = sum(self._layer_record(layer).size for layer in dict.fromkeys(record.layers))
        return Image(
            record.digest,
            size,
            record.env,
            record.user,
            record.workdir,
            record.entrypoint,
            record.command,
            record.names,
        )


_FOLDERS: Final = ("images", "layers", "partial", "work")


def is_locked(path: Path) -> bool:
    """A download that somebody is writing to holds its lock."""
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def write_whole(path: Path, text: str, lock: contextlib.AbstractContextManager[object] = _NO_LOCK) -> None:
    """All of it or nothing, whatever happens. The lock is held while it gets its name, and not while a disk is slow."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    with lock:
        draft.rename(path)
