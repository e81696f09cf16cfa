"""Decides what an agentkernel.toml in the working directory may change. Pure.

A cloned repository brings its agentkernel.toml along. Unless the user named that file (`--config`) or trusts it
(`agentkernel trust`), it may only narrow what the command line and the user's configuration allow: the policy with the
file is compared with the policy without it, in every way in which a policy can be wider.
"""

from __future__ import annotations

from k8e.profiles.errors import ProfileError
from k8e.profiles.options import NO_OPTIONS, SandboxOptions, merge
from k8e.profiles.permissions import derive_permissions
from k8e.profiles.profile import MODES, PROFILES
from k8e.profiles.record import Record
from k8e.profiles.sandbox_policy import build_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from k8e.profiles.config.file import Config
    from k8e.profiles.options import Context
    from k8e.profiles.sandbox_policy import SandboxPolicy


def decide(
    asked: SandboxOptions,
    context: Context,
    command: Sequence[str] = (),
    *,
    user: SandboxOptions = NO_OPTIONS,
    file: Config | None = None,
    trusted: bool = False,
    name: str = "",
    persistent: bool = False,
) -> SandboxPolicy:
    """Decides the policy for a command. Raises ProfileError; `widening_refused` when an untrusted file asks for
    more."""
    if file is None:
        return build_policy(asked, context, command, others=(user,), name=name, persistent=persistent)
    if not trusted:
        refuse_widening(asked, user, file)
    return build_policy(asked, context, command, others=(file.options, user), name=name, persistent=persistent)


class Widening(Record):
    where: str  # file, line and key
    way: str  # what it would open


def refuse_widening(asked: SandboxOptions, user: SandboxOptions, file: Config) -> None:
    found = find_widenings(asked, user, file)
    if not found:
        return
    raise ProfileError(
        "widening_refused",
        f"{file.file} asks for more than you do, and is not trusted",
        detail="; ".join(f"{each.where} ({each.way})" for each in found),
        hint=f"look at it, then `agentkernel trust {file.file}`, or name it: --config {file.file}",
    )


def find_widenings(asked: SandboxOptions, user: SandboxOptions, file: Config) -> tuple[Widening, ...]:
    without = derive_permissions(merge((asked, user)))
    found = []
    for option in file.options.said:
        single = derive_permissions(merge((asked, file.options.only(option), user)))
        found += [Widening(file.where(option), way) for way in single.wider_than(without)]
    if not found:  # no single key widens; all of them together may
        together = derive_permissions(merge((asked, file.options, user)))
        found += [Widening(file.file, way) for way in together.wider_than(without)]
    return (*found, *_find_image(asked, user, file), *_find_files(file))


def list_openings(user: SandboxOptions, file: Config) -> tuple[Widening, ...]:
    """Everything that a trusted file opens, whatever the command line says: for a command without options, what it
    opens only beside a profile or mode that is asked for, and the pools of the daemon."""
    found = list(find_widenings(NO_OPTIONS, user, file))
    seen = {each.where for each in found}
    beside = [
        *((f"--profile {name}", SandboxOptions(profile=name)) for name in PROFILES),
        *((f"--compatibility-mode {name}", SandboxOptions(mode=name)) for name in MODES),
    ]
    for words, asked in beside:
        new = [each for each in find_widenings(asked, user, file) if each.where not in seen]
        found += [Widening(each.where, f"with {words}: {each.way}") for each in new]
        seen |= {each.where for each in new}
    return (*found, *find_pools(file))


def find_pools(file: Config) -> tuple[Widening, ...]:
    """Warm sandboxes take memory of the machine: `daemon start` and `daemon prewarm` make them."""
    if file.daemon is None:
        return ()
    sizes = [f"{file.daemon.min_warm} for commands without a mode"] if file.daemon.min_warm else []
    sizes += [f"{pool.min_warm} for {pool.name}" for pool in file.daemon.agents if pool.min_warm]
    most = "" if file.daemon.max_warm is None else f", {file.daemon.max_warm} in all at most"
    kept = f"sandboxes are kept ready: {', '.join(sizes)}{most}" if sizes else "no sandboxes are kept ready"
    return (Widening(file.where("daemon"), f"{kept}, instead of what your own configuration says"),)


def _find_image(asked: SandboxOptions, user: SandboxOptions, file: Config) -> Iterable[Widening]:
    """An image that the file names is fetched with the user's credentials from where the file says, and the project's
    code then has its content. The images of the table are public."""
    from k8e.profiles.languages import IMAGES

    image = file.options.image
    if image is None or image in IMAGES or asked.image is not None or asked.language is not None:
        return
    if image != user.image:
        yield Widening(file.where("image"), f"the image {image} is fetched with your credentials")


def _find_files(file: Config) -> Iterable[Widening]:
    from k8e.profiles.protection import is_private

    for each in file.options.files or ():
        if each.source.startswith(("/", "~")) or ".." in each.source.split("/"):
            yield Widening(file.where("files"), f"{each.source} is not of the project")
        elif is_private(each.source):
            yield Widening(file.where("files"), f"{each.source} looks like a secret")


# A file is trusted by its path and content: neither a changed file nor a copy elsewhere is.


class Trusted(Record):
    path: str
    sha256: str


def read_trusted(text: str) -> tuple[Trusted, ...]:
    """Reads the list of trusted files; entries that cannot be read are not trusted."""
    import json

    try:
        entries: Any = json.loads(text)["trusted"]
        return tuple(Trusted(str(entry["path"]), str(entry["sha256"])) for entry in entries)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()


def write_trusted(entries: Iterable[Trusted]) -> str:
    import json

    listed = [{"path": each.path, "sha256": each.sha256} for each in sorted(entries, key=lambda each: each.path)]
    return json.dumps({"trusted": listed}, indent=2) + "\n"


def is_trusted(entries: Iterable[Trusted], path: str, content: bytes) -> bool:
    return Trusted(path, fingerprint(content)) in entries


def trust(entries: Iterable[Trusted], path: str, content: bytes) -> tuple[Trusted, ...]:
    return (*revoke(entries, path), Trusted(path, fingerprint(content)))


def revoke(entries: Iterable[Trusted], path: str) -> tuple[Trusted, ...]:
    return tuple(each for each in entries if each.path != path)


def fingerprint(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()
