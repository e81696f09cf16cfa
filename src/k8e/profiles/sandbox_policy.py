"""The policy of one sandbox, decided before the sandbox is made; --dry-run shows it. Pure."""

from __future__ import annotations

from k8e.profiles.detection import Detected, detect
from k8e.profiles.errors import ProfileError
from k8e.profiles.hosts import Hosts
from k8e.profiles.languages import BY_NAME
from k8e.profiles.options import FileCopy, SandboxOptions, merge
from k8e.profiles.permissions import Permissions, derive_permissions
from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from k8e.profiles.mounts import Mount
    from k8e.profiles.options import Context

HOST_IMAGE = "host"
HOME = "/home/user"  # the home inside the sandbox
NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
# A home that cannot be written to has its caches in /tmp.
CACHES = (("XDG_CACHE_HOME", "/tmp/.cache"), ("npm_config_cache", "/tmp/.cache/npm"))
DETECTED = ("command", "project", "default")  # values of image_by when the user did not name an image
FRONT = "agentkernel"  # the label of agentkernel's sandboxes among all sessions


class SandboxPolicy(Record):
    image: str
    image_by: str  # asked, language, command, project or default
    image_reason: str
    profile: str
    mode: str
    hosts: Hosts
    mounts: tuple[Mount, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    env_withheld: tuple[str, ...] = ()
    env_left_out: tuple[str, ...] = ()
    read_only: bool = False
    powerless: bool = False
    limits: tuple[tuple[str, float], ...] = ()
    files: tuple[FileCopy, ...] = ()
    needs: tuple[str, ...] = ()  # commands that the image must have
    name: str = ""
    persistent: bool = False
    workdir: str = ""  # where commands start; empty: the workspace

    @property
    def detected(self) -> bool:
        """Whether the image was detected, not named; then fallback.py may replace it."""
        return self.image_by in DETECTED

    @property
    def labels(self) -> dict[str, str]:
        return {
            "front": FRONT,
            "kind": "sandbox" if self.persistent else "run",
            "profile": self.profile,
            "mode": self.mode,
            "image_by": self.image_by,
        }

    def to_request(self) -> dict[str, Any]:
        """Returns the body of POST /v1/sessions, without the defaults."""
        body: dict[str, Any] = {"image": self.image, **self.hosts.to_request(), "labels": self.labels}
        if self.name:
            body["session_id"] = self.name
        if self.mounts:
            body["mounts"] = [mount.to_request() for mount in self.mounts]
        if self.workdir:
            body["workdir"] = self.workdir
        if self.env:
            body["env"] = dict(self.env)
        if self.limits:
            body["limits"] = dict(self.limits)
        body.update({flag: True for flag in ("read_only", "powerless", "persistent") if getattr(self, flag)})
        return body

    def to_json(self) -> dict[str, Any]:
        """Returns the policy for programs: the request without the values of variables, and the reasons."""
        shown: dict[str, Any] = {"image": self.image, "image_by": self.image_by, "image_reason": self.image_reason}
        shown |= {"profile": self.profile, "mode": self.mode, "network": self.hosts.describe()}
        shown |= self.hosts.to_request()
        shown |= {"mounts": [mount.to_request() for mount in self.mounts], "env_keys": [name for name, _ in self.env]}
        shown |= {"env_withheld": list(self.env_withheld), "env_left_out": list(self.env_left_out)}
        shown |= {"read_only": self.read_only, "powerless": self.powerless, "limits": dict(self.limits)}
        shown["files"] = [{"source": file.source, "dest": file.dest, "mode": f"{file.mode:04o}"} for file in self.files]
        return shown | {"persistent": self.persistent, "name": self.name}

    def describe(self) -> str:
        """Returns the policy for people, one line for each part."""
        from k8e.profiles.text import clean, describe_amount

        lines = [
            ("image", f"{self.image}  ({self.image_reason})"),
            ("profile", self.profile),
            ("mode", self.mode),
            ("network", self.hosts.describe()),
            *(("mount", _describe_mount(mount)) for mount in self.mounts),
            *(() if self.mounts else (("mount", "nothing"),)),
            ("environment", ", ".join(name for name, _ in self.env) or "its own"),
            *((("withheld", ", ".join(self.env_withheld)),) if self.env_withheld else ()),
            *((("left out", ", ".join(self.env_left_out)),) if self.env_left_out else ()),
            ("root", "read-only, /tmp can be written" if self.read_only else "can be written"),
            ("capabilities", "none" if self.powerless else "those of root inside"),
            (
                "limits",
                ", ".join(f"{name} {describe_amount(name, value)}" for name, value in self.limits)
                or "the machine's usual ones",
            ),
            *(("file", f"{file.source} as {file.dest}") for file in self.files),
        ]
        return "".join(f"{name + ':':<14}{clean(value)}\n" for name, value in lines)


def _describe_mount(mount: Mount) -> str:
    parts = [f"{mount.source} at {mount.target}, {'writable' if mount.writable else 'read-only'}"]
    kept = [name for name in mount.kept if name not in mount.private]
    if kept:
        parts.append(f"but for {', '.join(kept)}")
    if mount.private:
        parts.append(f"with {'a copy' if mount.private == ('.',) else ', '.join(mount.private)} of its own")
    if mount.hidden:
        parts.append(f"without credentials ({len(mount.hidden)} names, --json lists them)")
    return " ".join(parts)


def build_policy(
    asked: SandboxOptions,
    context: Context,
    command: Sequence[str] = (),
    *,
    others: Sequence[SandboxOptions] = (),
    name: str = "",
    persistent: bool = False,
) -> SandboxPolicy:
    """Builds the policy. `others` are options of trusted files, the most important first (trust.py checks the rest)."""
    options = merge((asked, *others))
    allowed = derive_permissions(options)
    if allowed.mount_home and context.cwd.startswith(f"{HOME}/"):
        context = context.but(copies=())  # at their own paths they would lie in the home's mount
    image, found = choose_image(options, context, command)
    variables: dict[str, str] = {}
    withheld: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    if allowed.pass_env:
        from k8e.profiles.environment import pass_environment

        passed = pass_environment(context.environ)
        variables, withheld, left_out = dict(passed.given), passed.withheld, passed.left_out
    if allowed.read_only or allowed.mount_home:
        variables.update(CACHES)
    if allowed.mount_home:
        variables["HOME"] = HOME
    return SandboxPolicy(
        image=image,
        image_by=found.by,
        image_reason=describe_choice(found),
        profile=allowed.profile,
        mode=allowed.mode,
        hosts=allowed.hosts,
        mounts=choose_mounts(allowed, context),
        env=tuple({**variables, **dict(options.env or ())}.items()),
        env_withheld=withheld,
        env_left_out=left_out,
        read_only=allowed.read_only,
        powerless=allowed.powerless,
        limits=allowed.limits,
        files=options.files or (),
        needs=found.needs,
        name=check_name(name) if name else "",
        persistent=persistent,
        workdir=context.cwd if allowed.mount_cwd and context.copies else "",
    )


def choose_mounts(allowed: Permissions, context: Context) -> tuple[Mount, ...]:
    if not allowed.mount_cwd and not allowed.mount_home:
        return ()
    from k8e.profiles.mounts import mount_home, mount_project

    project = mount_project(context) if allowed.mount_cwd else ()
    return (*project, mount_home(context)) if allowed.mount_home else project


def list_targets(options: SandboxOptions) -> tuple[str, ...]:
    """Returns the targets of the mounts, in the order of `choose_mounts`."""
    from k8e.profiles.mounts import PROJECT

    allowed = derive_permissions(options)
    return (*((PROJECT,) if allowed.mount_cwd else ()), *((HOME,) if allowed.mount_home else ()))


def choose_image(options: SandboxOptions, context: Context, command: Sequence[str]) -> tuple[str, Detected]:
    if options.image is not None:
        return options.image, Detected(options.image, "asked")
    if options.language is not None:
        language = find_language(options.language)
        return language, Detected(language, "language", options.language)
    found = detect(command, context.names, context.read_start)
    return found.image, found


def find_language(name: str) -> str:
    if name == "base":  # the original agentkernel's name for it
        from k8e.profiles.languages import DEFAULT_IMAGE

        return DEFAULT_IMAGE
    if name not in BY_NAME:
        raise ProfileError(
            "unknown_runtime", f"there is no runtime {name!r}", hint=f"one of: base, {', '.join(BY_NAME)}"
        )
    return BY_NAME[name].image


def describe_choice(found: Detected) -> str:
    if found.by == "asked":
        return "asked for"
    return f"for {found.language}" if found.by == "language" else found.reason


def check_name(name: str) -> str:
    """Checks a sandbox's name before any request is sent; the service checks it again."""
    if not 1 <= len(name) <= 63 or not NAME.issuperset(name) or name.startswith("-"):
        raise ProfileError(
            "invalid_name",
            f"{name[:80]!r} is no name for a sandbox",
            hint="1 to 63 of A-Z a-z 0-9 _ -, the first one no -",
        )
    return name
