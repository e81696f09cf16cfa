"""The options of a sandbox (from the command line, a file, or a call over MCP; None: not given), and the facts about
the invocation, so that deciding itself is pure."""

from __future__ import annotations

from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class FileCopy(Record):
    """A file of the machine that is copied into a new sandbox."""

    source: str  # as written: relative to the file that names it
    dest: str  # absolute, inside
    mode: int = 0o644


class SandboxOptions(Record):
    name: str | None = None
    image: str | None = None
    language: str | None = None  # its name in the table, instead of detection
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
    files: tuple[FileCopy, ...] | None = None

    @property
    def said(self) -> tuple[str, ...]:
        """Returns the names of the options that are given."""
        return tuple(name for name in self.field_names if self.__dict__[name] is not None)

    def only(self, name: str) -> SandboxOptions:
        return SandboxOptions(**{name: self.__dict__[name]})

    def over(self, other: SandboxOptions) -> SandboxOptions:
        """Combines both; an option that both give has the value of this one."""
        return SandboxOptions(**{**other.__dict__, **{name: self.__dict__[name] for name in self.said}})


NO_OPTIONS = SandboxOptions()


def merge(layers: Iterable[SandboxOptions]) -> SandboxOptions:
    """Merges layers; the first that gives an option decides it. Image and language count as one option: both choose
    the image."""
    merged = NO_OPTIONS
    for layer in layers:
        if merged.image is not None or merged.language is not None:
            layer = layer.but(image=None, language=None)
        if merged.allowed_hosts is not None or merged.network is False:
            layer = layer.but(allowed_hosts=None, more_hosts=None)
        merged = merged.over(layer)
    return merged


def nothing_to_read(path: str) -> bytes:
    return b""


class Context(Record):
    """All paths are absolute and without links; an empty path means that there is none."""

    cwd: str = ""
    home: str = ""
    names: frozenset[str] = frozenset()  # of the files in the directory
    environ: Mapping[str, str] = {}
    read_start: Callable[[str], bytes] = staticmethod(nothing_to_read)  # the first bytes of a file in the directory
    # The directories of the project's repository, and where they are inside, if it is not .git in the directory.
    copies: tuple[tuple[str, str], ...] = ()
