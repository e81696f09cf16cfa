"""Reads agentkernel.toml strictly: an unknown key or value is an error that names the line. Pure.

Every key is applied or refused. Keys of the original agentkernel that k8e does not support are refused with a hint,
because a key that is ignored would make a sandbox that differs from what its user expects.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from k8e.profiles.config.lines import find_lines
from k8e.profiles.config.values import (
    KEYS,
    Key,
    list_words,
    one_of,
    read_absolute,
    read_count,
    read_flag,
    read_hosts,
    read_language,
    read_mode,
    read_text,
)
from k8e.profiles.errors import ProfileError
from k8e.profiles.options import FileCopy, SandboxOptions
from k8e.profiles.profile import MODES
from k8e.profiles.record import Record

MAX_SIZE: Final = 256 << 10
FILE_NAME: Final = "agentkernel.toml"
AGENTS: Final = ("claude", "codex", "gemini")

REFUSED: Final = {
    "build": "images are not built here: build it with podman or docker, `k8e image import` it, name it in base_image",
    "network": "vsock belongs to another kind of sandbox: leave the section out",
    "orchestrator": "sandboxes live on this machine: leave the section out",
    "enterprise": "the machine's administrator decides in k8e.toml (docs/settings.md): leave the section out",
    "security.commands": "what may be run is not decided by a command's name, which any program can have: leave it out",
    "security.seccomp": "system calls are always filtered, by the engine's own list: leave it out",
    "security.domains.block": "what is not listed is blocked: write allow and allowlist_only = true",
}


class AgentPool(Record):
    """`[daemon.agents.NAME]`: how many sandboxes an agent's mode has ready."""

    name: str
    min_warm: int
    runtime: str = ""  # a language; empty: the machine's own tools


class PoolSizes(Record):
    min_warm: int = 0
    max_warm: int | None = None
    agents: tuple[AgentPool, ...] = ()


_TOML = "`agentkernel init --dry-run` prints one with every key"


class Config(Record):
    file: str
    options: SandboxOptions = SandboxOptions()
    preferred: str = ""  # the agent for commands that name none
    daemon: PoolSizes | None = None
    places: Mapping[str, tuple[str, int]] = {}

    def where(self, option: str) -> str:
        key, line = self.places.get(option, (option, 0))
        return f"{self.file}:{line}: {key}" if line else f"{self.file}: {key}"


def read_config(text: str, file: str) -> Config:
    """Raises ProfileError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError("config_syntax", f"{file} is not TOML", detail=str(error), hint=_TOML) from error
    except RecursionError as error:
        raise ProfileError("config_syntax", f"{file} is nested too deeply", hint=_TOML) from error
    return _Reader(file, find_lines(text)).read(table)


class _Reader:
    def __init__(self, file: str, lines: Mapping[tuple[str, ...], int]) -> None:
        self._file = file
        self._lines = lines
        self._options: dict[str, Any] = {}
        self._places: dict[str, tuple[str, int]] = {}

    def read(self, table: Mapping[str, Any]) -> Config:
        known = ("sandbox", "agent", "security", "resources", "daemon", "files")
        for name, content in table.items():
            self._check_known((name,), known)
            if name == "files":
                self._read_files(content)
            elif not isinstance(content, dict):
                self._refuse((name,), "is not a section", f"[{name}]")
        for name in ("sandbox", "security", "resources"):
            self._read_section((name,), table.get(name, {}), KEYS[name])
        self._read_domains(table.get("security", {}).get("domains"))
        preferred = self._read_agent(table.get("agent", {}))
        daemon = self._read_daemon(table["daemon"]) if "daemon" in table else None
        return Config(self._file, SandboxOptions(**self._options), preferred, daemon, self._places)

    def _read_section(self, path: tuple[str, ...], content: Mapping[str, Any], keys: Mapping[str, Key]) -> None:
        for name, value in content.items():
            here = (*path, name)
            if here == ("security", "domains"):
                continue
            self._check_known(here, tuple(keys))
            option, allowed, read = keys[name]
            if option in self._options:
                self._refuse(here, f"says the same as {self._places[option][0]}", "leave one of them out")
            self._set(option, here, self._read(here, value, allowed, read))

    def _read_agent(self, content: Mapping[str, Any]) -> str:
        preferred = ""
        for name, value in content.items():
            here = ("agent", name)
            self._check_known(here, ("preferred", "compatibility_mode"))
            if name == "preferred":
                preferred = self._read(here, value, list_words(AGENTS), one_of(AGENTS))
            else:
                self._set("mode", here, self._read(here, value, list_words(MODES), one_of(MODES)))
        return preferred

    def _read_domains(self, content: Any) -> None:
        if content is None:
            return
        path = ("security", "domains")
        if not isinstance(content, dict):
            self._refuse(path, "is not a section", "[security.domains]")
        hosts: tuple[str, ...] | None = None
        only = False
        for name, value in content.items():
            here = (*path, name)
            self._check_known(here, ("allow", "allowlist_only"))
            if name == "allow":
                hosts = self._read(here, value, "a list of hosts", read_hosts)
            else:
                only = self._read(here, value, "true or false", read_flag)
        if hosts is None and not only:
            return
        if "allowed_hosts" in self._options:
            self._refuse(path, "says the same as security.allowed_hosts", "leave one of them out")
        self._set("allowed_hosts" if only else "more_hosts", (*path, "allow"), hosts or ())

    def _read_files(self, content: Any) -> None:
        if not isinstance(content, list):
            self._refuse(("files",), "is not a list of tables", "[[files]]")
        files = []
        for index, entry in enumerate(content):
            path = ("files", str(index))
            if not isinstance(entry, dict):
                self._refuse(path, "is not a table", "[[files]]")
            for name in entry:
                self._check_known((*path, name), ("source", "dest", "mode"))
            for name in ("source", "dest"):
                if name not in entry:
                    self._refuse(path, f"has no {name}", "source and dest")
            source = self._read((*path, "source"), entry["source"], "a path", read_text)
            dest = self._read((*path, "dest"), entry["dest"], "an absolute path", read_absolute)
            mode = self._read((*path, "mode"), entry.get("mode", "0644"), 'text such as "0644"', read_mode)
            files.append(FileCopy(source, dest, mode))
        self._set("files", ("files",), tuple(files))

    def _read_daemon(self, content: Mapping[str, Any]) -> PoolSizes:
        numbers: dict[str, int] = {}
        pools: list[AgentPool] = []
        for name, value in content.items():
            here = ("daemon", name)
            self._check_known(here, ("min_warm", "max_warm", "agents"))
            if name == "agents":
                pools = self._read_pools(here, value)
            else:
                numbers[name] = self._read(here, value, "0 to 1000", read_count(0, 1000))
        if numbers.get("min_warm", 0) > numbers.get("max_warm", 1000):
            self._refuse(("daemon", "min_warm"), "is more than max_warm", "not more than max_warm")
        self._places["daemon"] = ("[daemon]", self._line(("daemon",)))
        return PoolSizes(**numbers, agents=tuple(pools))

    def _read_pools(self, path: tuple[str, ...], content: Any) -> list[AgentPool]:
        if not isinstance(content, dict):
            self._refuse(path, "is not a section", "[daemon.agents.NAME]")
        pools = []
        for agent, entry in content.items():
            here = (*path, agent)
            self._check_known(here, tuple(MODES))
            if not isinstance(entry, dict):
                self._refuse(here, "is not a section", f"[daemon.agents.{agent}]")
            for name in entry:
                self._check_known((*here, name), ("min_warm", "runtime"))
            number = self._read((*here, "min_warm"), entry.get("min_warm", 1), "0 to 1000", read_count(0, 1000))
            runtime = entry.get("runtime", "")
            if runtime != "":
                self._read((*here, "runtime"), runtime, "a language", read_language)
            pools.append(AgentPool(agent, number, runtime))
        return pools

    # Keys

    def _set(self, option: str, path: tuple[str, ...], value: Any) -> None:
        self._options[option] = value
        self._places[option] = (".".join(path), self._line(path))

    def _read(self, path: tuple[str, ...], value: Any, allowed: str, read: Callable[[Any], Any]) -> Any:
        try:
            return read(value)
        except ProfileError as problem:
            self._refuse(path, f"{problem.error}", problem.hint, value)
        except ValueError as error:
            self._refuse(path, str(error), f"allowed: {allowed}", value)

    def _check_known(self, path: tuple[str, ...], known: tuple[str, ...]) -> None:
        key = ".".join(path)
        if hint := REFUSED.get(key):
            raise ProfileError("config_refused", f"{self._place(path)}: {key} cannot be honoured", hint=hint)
        if path[-1] not in known:
            section = ".".join(path[:-1])
            what = f"there is no key {path[-1]} in [{section}]" if section else f"there is no section [{path[-1]}]"
            raise ProfileError("config_unknown", f"{self._place(path)}: {what}", hint=f"one of: {', '.join(known)}")

    def _refuse(self, path: tuple[str, ...], cause: str, hint: str, value: object = None) -> NoReturn:
        detail = "" if value is None else f"it is {value!r}"[:200]
        raise ProfileError("config_invalid", f"{self._place(path)}: {'.'.join(path)} {cause}", detail=detail, hint=hint)

    def _place(self, path: tuple[str, ...]) -> str:
        line = self._line(path)
        return f"{self._file}:{line}" if line else self._file

    def _line(self, path: tuple[str, ...]) -> int:
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 0)
