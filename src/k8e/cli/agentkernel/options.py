"""Options of `run` and `sandbox create` about the sandbox: one table, for argparse and for the reader of leading
options."""

from __future__ import annotations

from k8e.profiles.options import SandboxOptions
from k8e.profiles.profile import MODES, PROFILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def read_choice(words: Any) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return read


def read_word(text: str) -> str:
    """`--image "$IMAGE"` without an IMAGE is a mistake, and not the image that fits the command."""
    if not text:
        raise ValueError(text)
    return text


def read_cpus(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 1024:
        raise ValueError(text)
    return value


def read_size(text: str) -> int:
    from k8e.cli.values import read_size

    return read_size(text)


def read_hosts(texts: list[str]) -> tuple[str, ...]:
    from k8e.cli.values import split_hosts

    return tuple(split_hosts(texts))


def read_variables(texts: list[str]) -> tuple[tuple[str, str], ...]:
    from k8e.cli.values import read_env

    return tuple(read_env(texts).items())


class CommandOptions:
    """The values of the options, as the command line has them."""

    def __init__(self) -> None:
        self.image: str | None = None
        self.profile: str | None = None
        self.compatibility_mode: str | None = None
        self.config: str | None = None
        self.no_network = False
        self.allowed_hosts: list[str] = []
        self.env: list[str] = []
        self.cpus: float | None = None
        self.memory: int | None = None
        self.disk: int | None = None
        self.pids: int | None = None
        self.dry_run = False
        self.json = False

    @property
    def sandbox_options(self) -> SandboxOptions:
        return SandboxOptions(
            image=self.image,
            profile=self.profile,
            mode=self.compatibility_mode,
            network=False if self.no_network else None,
            allowed_hosts=read_hosts(self.allowed_hosts) if self.allowed_hosts else None,
            cpus=self.cpus,
            memory=self.memory,
            disk=self.disk,
            pids=self.pids,
            env=read_variables(self.env) if self.env else None,
        )


# What reads the value (None: a flag; list: may come several times), what it is called, what it is for.
OPTIONS: dict[str, tuple[Callable[[str], object] | None, str, str]] = {
    "--image": (
        read_word,
        "NAME",
        "an image instead of the one that fits the command; `host`: this machine's tools",
    ),
    "--profile": (read_choice(PROFILES), "NAME", "the security profile: restrictive, moderate (default) or permissive"),
    "--compatibility-mode": (read_choice(MODES), "NAME", "native (default), claude, codex or gemini"),
    "--config": (read_word, "FILE", "this agentkernel.toml, which you thereby trust, instead of the folder's own"),
    "--no-network": (None, "", "nothing but loopback"),
    "--allowed-hosts": (list, "HOSTS", "what it may reach, instead of what profile and mode say; commas between"),
    "--env": (list, "NAME=VALUE", "a variable; may be given several times"),
    "--cpus": (read_cpus, "N", "default: the machine's, usually 1"),
    "--memory": (read_size, "SIZE", "such as 512m or 2g; default: the machine's, usually 1g"),
    "--disk": (read_size, "SIZE", "default: the machine's, usually 2g"),
    "--pids": (int, "N", "processes and threads at once; default: the machine's, usually 512"),
    "--dry-run": (None, "", "show what the sandbox would be, and make none"),
    "--json": (None, "", "print JSON"),
}
