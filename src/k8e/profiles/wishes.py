"""What somebody asked for: on the command line, in a file, over MCP. None is: said nothing about it."""

from __future__ import annotations

from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class FileWish(Record):
    """A file of the machine that is copied into a new sandbox."""

    source: str  # as it is written: relative to the file that says it
    dest: str  # absolute, inside
    mode: int = 0o644


class Wishes(Record):
    name: str | None = None
    image: str | None = None
    language: str | None = None  # by its name in the table, instead of detecting it
    profile: str | None = None
    mode: str | None = None
    network: bool | None = None
    mount_cwd: bool | None = None
    mount_home: bool | None = None
    pass_env: bool | None = None
    read_only: bool | None = None
    allowed_hosts: tuple[str, ...] | None = None  # exactly these
    more_hosts: tuple[str, ...] | None = None  # besides the mode's
    cpus: float | None = None
    memory: int | None = None
    disk: int | None = None
    pids: int | None = None
    env: tuple[tuple[str, str], ...] | None = None
    files: tuple[FileWish, ...] | None = None

    @property
    def said(self) -> tuple[str, ...]:
        """The names of what it says anything about."""
        return tuple(name for name in self.field_names if self.__dict__[name] is not None)

    def only(self, name: str) -> Wishes:
        return Wishes(**{name: self.__dict__[name]})

    def over(self, other: Wishes) -> Wishes:
        """Together; what both say is as it is here."""
        return Wishes(**{**other.__dict__, **{name: self.__dict__[name] for name in self.said}})


NOTHING_SAID = Wishes()


def merge(layers: Iterable[Wishes]) -> Wishes:
    """The first one that says something about a thing decides about it. An image and a language are one thing: both say
    what it is made of."""
    merged = NOTHING_SAID
    for layer in layers:
        if merged.image is not None or merged.language is not None:
            layer = layer.but(image=None, language=None)
        if merged.allowed_hosts is not None or merged.network is False:
            layer = layer.but(allowed_hosts=None, more_hosts=None)
        merged = merged.over(layer)
    return merged
