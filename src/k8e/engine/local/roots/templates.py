"""Templates of disks: one for each size that is asked for, made once. The machine's registries are configured on it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from k8e.damage import Damaged, Damages, own_directory, read_own
from k8e.engine import EngineError, Limits
from k8e.engine.local.disk import disk
from k8e.engine.local.disk.tree import digest_tree
from k8e.engine.local.layout import Layout
from k8e.engine.local.roots import host_image
from k8e.engine.local.toolchain.registries import Registries, find_registries
from k8e.engine.tasks import Once
from k8e.link.binary import VerifiedBinary, agent_binary, loader_library, place

_BLANK = "blank-1"  # another number for another layout


class Templates:
    def __init__(self, layout: Layout, tools: Path, damages: Damages) -> None:
        self._layout = layout
        self._damages = damages
        self._tools = tools
        self._registries: Once[str, Registries] = Once()
        self._contents: Once[str, Path] = Once()
        self._disks: Once[tuple[Path, int, int, bool], disk.Template] = Once()

    async def registries(self) -> Registries:
        with _explained("registries", "cannot be found out"):
            return await self._registries.get("", self._find_registries)

    @property
    def known_registries(self) -> Registries | None:
        """Without waiting, once they were found."""
        task = self._registries.tasks.get("")
        return None if task is None or not task.done() or task.cancelled() or task.exception() else task.result()

    async def _find_registries(self) -> Registries:
        await asyncio.to_thread(make_directories, self._layout, self._damages)
        return await find_registries(memory=self._layout.state / "clients.json", tools=self._tools)

    async def content(self) -> Path:
        """Returns the directory whose content every sandbox of the image `host` starts with; made once by a daemon."""
        registries = await self.registries()
        with _explained("image", "cannot be prepared"):
            return await self._contents.get("host", lambda: asyncio.to_thread(self._prepare, registries))

    async def disk_for(self, limits: Limits, *, journal: bool = False) -> disk.Template:
        return await self._disk_with(self.content, limits, journal)

    async def blank_for(self, limits: Limits, *, journal: bool = False) -> disk.Template:
        """Returns an empty disk, for the root of an image."""
        return await self._disk_with(self._blank_content, limits, journal)

    async def _blank_content(self) -> Path:
        await self.content()  # which clears away what is out of date
        with _explained("disk", "cannot be prepared"):
            return await self._contents.get(_BLANK, lambda: asyncio.to_thread(self._prepare_blank))

    async def _disk_with(
        self, find_content: Callable[[], Awaitable[Path]], limits: Limits, journal: bool
    ) -> disk.Template:
        content = await find_content()
        if self._forget_missing(content, (content, limits.disk, limits.inodes, journal)):
            content = await find_content()
        key = (content, limits.disk, limits.inodes, journal)
        with _explained("disk", "cannot be prepared"):
            return await self._disks.get(key, lambda: self._make_disk(*key))

    def _forget_missing(self, content: Path, key: tuple[Path, int, int, bool]) -> bool:
        """Whether the template was made and is gone: a person has cleared the directory. Two looks at names, which the
        kernel has in memory."""
        if key not in self._disks.tasks or os.path.lexists(self._name_disk(*key)):
            return False
        self._disks.forget(key)
        if not os.path.lexists(content):
            for name in ("host", _BLANK):
                self._contents.forget(name)
        return True

    def _name_disk(self, content: Path, size: int, inodes: int, journal: bool) -> Path:
        return content.with_name(f"{content.name}-{size}-{inodes}{'-journal' if journal else ''}.img")

    async def _make_disk(self, content: Path, size: int, inodes: int, journal: bool) -> disk.Template:
        target = self._name_disk(content, size, inodes, journal)
        if not await asyncio.to_thread(self._is_sound, target):
            await disk.make_template(content, size, inodes, target, journal=journal)
        return await asyncio.to_thread(disk.load_template, target)

    def _is_sound(self, image: Path) -> bool:
        try:
            disk.check_template(image)
            return True
        except FileNotFoundError:
            return False
        except Damaged as error:
            for path in (image, image.with_suffix(".sha256")):
                if os.path.lexists(path):
                    self._damages.set_aside(path, error)
            return False

    def _prepare(self, registries: Registries) -> Path:
        images = self._layout.images
        for binary in (agent_binary(), loader_library()):
            target = self._layout.agents / binary.sha256
            self._place(binary, target)
        with tempfile.TemporaryDirectory(dir=images, prefix=".root-") as scratch:
            content = Path(scratch, "content")
            content.mkdir()
            content.chmod(0o755)
            host_image.build_root(content / "root", registries.files)
            host_image.build_workspace(content / "workspace")
            digest = digest_tree(content)
            final = images / f"host-{digest}"
            self._put(content, final, digest)
        for old in images.iterdir():
            ours = old.name.startswith((f"{final.name}-", f"{_BLANK}-")) and old.suffix in (".img", ".sha256")
            if old.name not in (final.name, _BLANK) and not ours:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        return final

    def _prepare_blank(self) -> Path:
        final = self._layout.images / _BLANK
        with tempfile.TemporaryDirectory(dir=self._layout.images, prefix=".blank-") as scratch:
            content = Path(scratch, "content")
            for name in ("", "root", "upper", "work"):
                (content / name).mkdir()
                (content / name).chmod(0o755)  # whatever the umask is
            host_image.build_workspace(content / "workspace")
            self._put(content, final, digest_tree(content))
        return final

    def _put(self, content: Path, final: Path, digest: str) -> None:
        """Renames it, unless it is there already. A directory with other content in its place is set aside."""
        if os.path.lexists(final) and (final.is_symlink() or digest_tree(final) != digest):
            self._damages.set_aside(final, "it is not what it was made from")
        if not final.exists():
            content.rename(final)

    def _place(self, binary: VerifiedBinary, target: Path) -> None:
        try:
            if hashlib.sha256(read_own(target)).hexdigest() == binary.sha256:
                return
            self._damages.set_aside(target, "it is not the program that it is named after")
        except FileNotFoundError:
            pass
        except Damaged as error:
            self._damages.set_aside(target, error)
        place(binary, target)

    async def close(self) -> None:
        """Ends what is under way. What is made stays known."""
        for work in (self._registries, self._contents, self._disks):
            await work.close()


@contextlib.contextmanager
def _explained(control: str, failure: str) -> Iterator[None]:
    """Explains an OSError: a full disk, a file that cannot be read now. The next caller tries again."""
    try:
        yield
    except OSError as error:
        raise EngineError(control, f"{failure}: {error}") from error


def make_directories(layout: Layout, damages: Damages) -> None:
    for directory in (layout.state, layout.run):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o711)  # whatever the umask is
    for directory in (layout.sandboxes, layout.agents):
        own_directory(directory, 0o711, damages)
    own_directory(layout.images, 0o700, damages)
