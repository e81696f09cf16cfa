"""Which of the machine's folders a cage sees, and what of them stays closed. Pure."""

from __future__ import annotations

from k8e.profiles.credentials import HIDDEN, has_credentials, is_credential_path
from k8e.profiles.effective import HOME
from k8e.profiles.errors import ProfileError
from k8e.profiles.protection import NEVER_BELOW, SYSTEM, choose_kept, is_repository
from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.profiles.scene import Scene

PROJECT = "/workspace"


class Mount(Record):
    source: str
    target: str
    writable: bool = False
    kept: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    def to_request(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "writable": self.writable,
            "kept": list(self.kept),
            "hidden": list(self.hidden),
        }


def mount_project(scene: Scene) -> Mount:
    check_project(scene)
    return Mount(scene.cwd, PROJECT, writable=True, kept=choose_kept(scene.names))


def mount_home(scene: Scene) -> Mount:
    if not scene.home.startswith("/") or scene.home == "/":
        raise ProfileError(
            "no_home", "there is no home to mount", detail=scene.home, hint="set HOME, or mount_home = false"
        )
    return Mount(scene.home, HOME, hidden=HIDDEN)  # by name: what is not there yet is hidden when it comes


def check_project(scene: Scene) -> None:
    """A folder that is more than a project would give away what has nothing to do with it."""
    where = scene.cwd
    if not where.startswith("/"):
        raise ProfileError("no_project", "there is no project folder to mount", hint="run it in the project's folder")
    if where in SYSTEM or any(where.startswith(system + "/") for system in NEVER_BELOW):
        raise _too_wide(where, "it is a part of the system")
    if is_repository(scene.names) or ".git" in where.split("/"):
        raise _too_wide(where, "it is the inside of a repository, whose configuration git on this machine obeys")
    for home in list_homes(scene):
        if where == home or home.startswith(where + "/"):
            raise _too_wide(where, "it is a home, or has one inside")
        below = where.removeprefix(home + "/")
        if below != where and (is_credential_path(below) or has_credentials(below)):
            raise _too_wide(where, "it is where credentials are kept")


def list_homes(scene: Scene) -> tuple[str, ...]:
    """The user's own, and whose folder it is: with sudo the one is not the other."""
    _, first, second, *_ = (*scene.cwd.split("/"), "", "")
    others = (f"/{first}/{second}",) if first in ("home", "Users") and second else ()
    own = scene.home.rstrip("/")
    return (*((own,) if own else ()), "/root", *others)


def _too_wide(where: str, cause: str) -> ProfileError:
    return ProfileError(
        "project_refused",
        f"{where} is not mounted as a project",
        detail=cause,
        hint="run it in a folder of the project's own, or with --profile moderate and no compatibility mode",
    )
