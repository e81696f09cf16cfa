"""The store of images: layers as directories in overlayfs' own form, each once, and a record of each image.

`<state>/layers/<hex>` is the layer whose uncompressed archive has that sha256, ready to be a lower directory: a file
that it removes is a character device 0:0, a directory that it replaces has the attribute trusted.overlay.opaque.
`<state>/oci` has the records, and what is under way. A name appears when everything behind it is complete; what a crash
leaves has another name, and the next start removes it.

Only root may walk into these directories: they hold setuid programs of images that are not trusted.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from k8e.damage import Damaged, Damages, own_directory
from k8e.engine.images import Image
from k8e.engine.local.images.layers import Unpacked, sync_filesystem
from k8e.engine.local.images.manifest import Configuration
from k8e.engine.local.images.records import Records, StoredImage, StoredLayer, write_whole
from k8e.engine.local.layout import Layout
from k8e.engine.local.record import Record, all_sandboxes

_STALE: Final = 7 * 86_400.0  # seconds after which half a download is removed
_FRESH: Final = 10.0  # seconds
LOCK: Final = ".lock"  # of a build
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Store:
    """Synchronous, and safe to use from several threads."""

    def __init__(self, layout: Layout, fresh: float = _FRESH, damages: Damages | None = None) -> None:
        self._layout = layout
        self._damages = damages or Damages(layout.state)
        self._records = Records(layout, self._damages)
        self._lock = threading.Lock()
        self._fresh_for = fresh
        self._fresh: dict[str, float] = {}  # images to which core has not given a name yet
        self._wanted: Counter[str] = Counter()  # layers that an image under way is going to need

    # Asking

    def find(self, digest: str) -> Image | None:
        record = self._records.find(digest)
        return None if record is None else self._show(record)

    def claim(self, digest: str) -> Image | None:
        """As `find`, and the image is kept for a while: core is about to name it."""
        with self._lock:
            image = self.find(digest)
            if image is not None:
                self._fresh[digest] = time.monotonic()
        return image

    def layers_of(self, digest: str) -> tuple[Path, ...]:
        """Lowest first. Of a layer that occurs twice the upper one is as good as both; KeyError when there is no such
        image (any more)."""
        record = self._records.find(digest)
        if record is None:
            raise KeyError(digest)
        chosen: list[str] = []
        for layer in reversed(record.layers):
            if layer not in chosen:
                chosen.append(layer)
            if self._records.layer(layer).whole:
                break
        return tuple(self.layer(layer) for layer in reversed(chosen))

    def list(self) -> Sequence[Image]:
        return [self._show(record) for record in sorted(self._records.all(), key=lambda record: record.made)]

    def layer(self, diff_id: str) -> Path:
        return self._layout.layers / diff_id

    def has_layer(self, diff_id: str) -> bool:
        return self.layer(diff_id).is_dir()

    # Keeping

    @contextlib.contextmanager
    def wanting(self, diff_ids: Collection[str]) -> Iterator[None]:
        """These are not removed until the end of the block, though no image has them yet."""
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
        """Another pull may have been faster, with the same layer."""
        record = StoredLayer(made.size, made.entries, made.whole, BOOT.read_text().strip())
        write_whole(self._records.layer_path(made.diff_id), json.dumps(asdict(record)))
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
        record = StoredImage(
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
        write_whole(self._records.image_path(digest), json.dumps(asdict(record)), self._lock)
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

    @property
    def building(self) -> Path:
        """Where an interrupted build has left files for the next one (unfinished.py)."""
        return self._layout.oci / "building"

    # Clearing up

    def prepare(self) -> None:
        for path in (self._layout.layers, self._layout.oci, *(self._layout.oci / name for name in _FOLDERS)):
            own_directory(path, 0o700, self._damages)

    def clean(self) -> None:
        """Removes what an earlier daemon left half done. Only when nothing is under way."""
        self.prepare()
        for left in (*self._layout.layers.glob(".*"), *(self._layout.oci / "work").iterdir()):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        for left in (*self.partial.iterdir(), *self.building.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                # Packages have the time at which they were published.
                found = left.stat()
                if time.time() - (found.st_ctime if left.suffix == ".deb" else found.st_mtime) > _STALE:
                    left.unlink()
        for folder in (self._records.images, self._layout.oci / "layers"):
            for left in folder.glob(".*"):
                left.unlink(missing_ok=True)
        self.restore()
        records = self._records.all()
        boot, used = BOOT.read_text().strip(), {layer for record in records for layer in record.layers}
        if self._misses_one(records):
            return
        for path in self._layout.layers.iterdir():
            if path.name in used:
                continue
            # Of an image that was never complete. Written before the machine went down, it may be hollow.
            if not self._records.layer_path(path.name).exists() or self._records.layer(path.name).boot != boot:
                self._remove_layer(path.name)

    def restore(self) -> None:
        """Brings images back that were being removed when a daemon died. Whether they are in use is asked again; until
        then they count as used, since a sandbox may be made of one."""
        for gone in self._records.images.glob("*.gone"):
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
            aside = [record for record in self._records.all() if record.digest not in keep]
            for record in aside:
                self._records.image_path(record.digest).rename(
                    self._records.image_path(record.digest).with_suffix(".gone")
                )
        used = self._in_use()
        for record in aside:
            gone = self._records.image_path(record.digest).with_suffix(".gone")
            if record.digest in used:
                gone.rename(self._records.image_path(record.digest))
            else:
                gone.unlink(missing_ok=True)
        return self._sweep()

    def _sweep(self) -> int:
        """Layers that no image has and no image under way needs; and downloads that no pull goes on with."""
        freed, old = 0, []
        with self._lock:
            records = self._records.all()
            used = {layer for record in records for layer in record.layers} | set(self._wanted)
            for path in () if self._misses_one(records) else self._layout.layers.iterdir():
                if not path.name.startswith(".") and path.name not in used:
                    aside = path.with_name(f".old-{path.name}")
                    path.rename(aside)
                    old.append((path.name, aside))
            idle = not self._wanted
        for name, aside in old:
            with contextlib.suppress(FileNotFoundError):
                freed += self._records.layer(name).size
            self._records.layer_path(name).unlink(missing_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
        unbuilt = () if is_locked(self.building / LOCK) else self.building.iterdir()
        for left in (*(self.partial.iterdir() if idle else ()), *unbuilt):
            with contextlib.suppress(FileNotFoundError):
                if not is_locked(left):
                    freed += left.stat().st_size
                    left.unlink()
        return freed

    def _misses_one(self, records: Sequence[StoredImage]) -> bool:
        """Whether a sandbox is made of an image that is not on record (any more): any layer may be under it."""
        return bool(self._in_use() - {record.digest for record in records} - {"host"})

    def _remove_layer(self, diff_id: str) -> None:
        shutil.rmtree(self.layer(diff_id), ignore_errors=True)
        self._records.layer_path(diff_id).unlink(missing_ok=True)

    def _in_use(self) -> set[str]:
        """The images of sandboxes; with a sandbox whose record is damaged also the empty string."""
        found = set()
        for paths in list(all_sandboxes(self._layout)):
            try:
                found.add(Record.load(paths.record).image)
            except (FileNotFoundError, NotADirectoryError):
                continue  # half made, and so made of nothing yet; or gone
            except (Damaged, OSError):
                found.add("")
        return found

    def _show(self, record: StoredImage) -> Image:
        size = sum(self._records.layer(layer).size for layer in dict.fromkeys(record.layers))
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


_FOLDERS: Final = ("images", "layers", "partial", "work", "building")


def is_locked(path: Path) -> bool:
    """A download or build under way holds its lock."""
    import fcntl

    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass  # none was ever under way
    return False
