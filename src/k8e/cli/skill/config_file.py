"""Files of other programs: read, and replaced in one step; a backup is kept beside them.

Links in a home are followed, because people keep their configuration elsewhere and link to it; the link stays. Links
in a project that lead out of it are refused: a project comes from anywhere, and must not choose what we write to.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from k8e.cli.process import Failure
from k8e.cli.skill.jsontext import NotJson
from k8e.cli.skill.tomltext import NotToml

Edit = Callable[[str], str]

SUFFIX = ".k8e-backup"
MAX_SIZE = 64 << 20
SEE_TO_IT = "nothing was changed: see to the file, or add the entry by hand"


class ConfigFile:
    def __init__(self, path: Path, within: Path | None = None) -> None:
        self.path = path
        self.target = self._resolve(within)
        self.backup = self.target.with_name(self.target.name + SUFFIX)
        self.content = self._read()  # None: there is none

    def _resolve(self, within: Path | None) -> Path:
        try:
            target = Path(os.path.realpath(self.path, strict=False))
        except OSError as error:
            raise self._failure("link_refused", "leads nowhere", str(error)) from error
        if self.path.is_symlink() and not target.exists():
            raise self._failure("link_refused", "is a link that leads nowhere", f"to {target}")
        if within is not None and not target.is_relative_to(os.path.realpath(within)):
            raise self._failure("link_refused", "is a link that leads out of this folder", f"to {target}")
        return target

    def _read(self) -> bytes | None:
        try:
            descriptor = os.open(self.target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failure("file_unreadable", "cannot be read", str(error)) from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_SIZE:
            os.close(descriptor)
            raise self._failure("file_unreadable", "is no file, or none of a size that can be meant")
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def read_text(self) -> str:
        try:
            return (self.content or b"").decode()
        except UnicodeDecodeError as error:
            raise self._failure("file_unparsable", "is not UTF-8", str(error)) from error

    def edit(self, change: Edit, page: str) -> str:
        """The changed text; nothing is written. `page` explains the entry."""
        try:
            return change(self.read_text())
        except (NotJson, NotToml) as error:
            hint = f"nothing was written; put it in order, or add the entry by hand ({page})"
            raise self._failure(
                "file_unparsable", "cannot be changed: it is not understood", str(error), hint
            ) from error

    def find_former(self, text: str, edits: Iterable[Edit]) -> bytes | None:
        """The content to restore at an uninstallation: the backup byte for byte, if nothing but one of the edits was
        made since; else the text. None: there was no file."""
        if self.content is None or self.content == text.encode():
            return self.content
        before = ConfigFile(self.backup).content if self.backup.exists() else None
        for edit in edits:
            try:
                if self.content == edit((before or b"").decode()).encode():
                    return before or None
            except (NotJson, NotToml, UnicodeDecodeError):
                continue
        return text.encode()

    def save(self, content: bytes | None, *, dry_run: bool) -> dict[str, str]:
        """Writes the content, or removes the file (None), and reports what was done."""
        report = {"path": str(self.path), "action": "unchanged"}
        if content == self.content or (not content and self.content is None):
            return report
        self.check_writable()
        report["action"] = "removed" if content is None else "created" if self.content is None else "updated"
        if dry_run:
            return report
        if content is None:
            self.remove()
            return report
        if self.content is not None:
            report["backup"] = str(self.backup)
        self.replace(content)
        return report

    def check_writable(self) -> None:
        if self.content is None:
            return
        if not self.target.stat().st_mode & 0o222 or not os.access(self.target, os.W_OK):
            raise self._failure("file_read_only", "is read-only", hint="make it writable, or add the entry by hand")

    def replace(self, content: bytes) -> None:
        """Writes the backup first. No reader ever sees a part of the new content."""
        self.check_writable()
        try:
            self._make_folders()
            if self.content is not None:
                self._put(self.backup, self.content)
            if self._read() != self.content:
                raise self._failure("file_changed", "was changed by another program meanwhile", hint="try again")
            self._put(self.target, content)
        except OSError as error:
            raise self._failure("file_unwritable", "cannot be written", str(error)) from error

    def remove(self) -> None:
        self.check_writable()
        try:
            self.target.unlink(missing_ok=True)
        except OSError as error:
            raise self._failure("file_unwritable", "cannot be removed", str(error)) from error

    def _make_folders(self) -> None:
        """Makes missing directories, which belong to the owner of the directory above, also when root installs."""
        missing = [folder for folder in self.target.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            self._give_away(folder, folder.parent.stat())

    def _put(self, path: Path, content: bytes) -> None:
        like = self.target.stat() if self.content is not None else None
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            draft.chmod(stat.S_IMODE(like.st_mode) if like else 0o600)  # others will write secrets into it
            self._give_away(draft, like or path.parent.stat())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    @staticmethod
    def _give_away(path: Path, like: os.stat_result) -> None:
        found = path.stat()
        if (found.st_uid, found.st_gid) != (like.st_uid, like.st_gid) and os.geteuid() == 0:
            os.chown(path, like.st_uid, like.st_gid)

    def _failure(self, code: str, error: str, detail: str = "", hint: str = SEE_TO_IT) -> Failure:
        return Failure(code, f"{self.path} {error}", detail=detail, hint=hint)
