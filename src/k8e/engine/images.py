"""The images of an engine: sandboxes are made of one, or of the toolchain of the machine itself. An engine knows images
by their digest; which names they have for which user is for core to say."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Image:
    digest: str  # sha256:..., of the manifest for this machine
    size: int  # bytes of its layers here, also of those that it shares with others
    env: tuple[tuple[str, str], ...] = ()
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # as the archive calls it that it came in: not checked


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of a registry's user. Never stored, never logged."""

    username: str = ""
    password: str = ""
    identity_token: str = ""  # instead of a password

    def __repr__(self) -> str:
        return "Credentials(...)"


@dataclass(frozen=True, slots=True)
class Progress:
    step: str  # a word for people: "downloading", "unpacking", ...
    done: int  # bytes
    total: int  # 0: not known


Report = Callable[[Progress], None]


class Images(Protocol):
    """Raises EngineError whose control is the image."""

    async def pull(self, reference: str, credentials: Credentials | None, report: Report) -> Image:
        """From the registry that the reference names. What was downloaded before is not downloaded again, also after
        an interruption; everything is checked against its digest."""

    async def add(self, archive: Path, report: Report) -> Image:
        """From a file as `docker save` or `skopeo copy ... oci-archive:` write it. Nothing that the file says is
        trusted."""

    async def take(self, pieces: AsyncIterable[bytes], report: Report) -> Image:
        """The same, from such a file as it comes."""

    async def build_base(self, report: Report) -> Image:
        """A Debian with Python, Node, git and common tools, from the packages of this machine's distribution."""

    def refer(self, reference: str) -> str:
        """Names what a sandbox of that reference is made of where it need not be pulled before, because the nodes of a
        cluster do so by themselves. Empty: sandboxes are made only of what was pulled, imported or built."""

    async def find(self, digest: str) -> Image | None: ...

    async def retain(self, digests: Collection[str]) -> int:
        """Removes every other image, but for what sandboxes are made of that exist. How many bytes that gave."""

    async def list(self) -> Sequence[Image]: ...
