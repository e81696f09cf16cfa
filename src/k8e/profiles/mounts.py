"""Chooses the directories of the machine that a sandbox sees, with their kept and hidden parts. Pure."""

from __future__ import annotations

from k8e.profiles.errors import ProfileError
from k8e.profiles.protection import (
    HIDDEN,
    NEVER_BELOW,
    PRIVATE,
    SYSTEM,
    choose_kept,
    has_credentials,
    is_credential_path,
    is_repository,
)
from k8e.profiles.record import Record
from k8e.profiles.sandbox_policy import HOME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from k8e.profiles.options import Context

PROJECT = "/workspace"
WHOLE = "."  # all of a mount


class Mount(Record):
    source: str
    target: str
    writable: bool = False
    kept: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    private: tuple[str, ...] = ()

    def to_request(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "writable": self.writable,
            "kept": list(self.kept),
            "hidden": list(self.hidden),
            "private": list(self.private),
        }


def mount_project(context: Context) -> tuple[Mount, ...]:
    """Returns the project's mount; and where its repository is elsewhere (a linked worktree, a folder of a repository)
    the repository's, both at the paths by which git knows them."""
    check_project(context)
    project = Mount(context.cwd, PROJECT, writable=True, kept=choose_kept(context.names), private=PRIVATE)
    if not context.copies:
        return (project,)
    copies = (Mount(source, target, private=(WHOLE,)) for source, target in context.copies)
    return project, project.but(target=context.cwd), *copies


def mount_home(context: Context) -> Mount:
    if not context.home.startswith("/") or context.home == "/":
        raise ProfileError(
            "no_home", "there is no home to mount", detail=context.home, hint="set HOME, or mount_home = false"
        )
    return Mount(context.home, HOME, hidden=HIDDEN)  # by name: a file that is made later is hidden, too


def check_project(context: Context) -> None:
    """Refuses a folder that contains more than a project."""
    where = context.cwd
    if not where.startswith("/"):
        raise ProfileError("no_project", "there is no project folder to mount", hint="run it in the project's folder")
    if where in SYSTEM or any(where.startswith(system + "/") for system in NEVER_BELOW):
        raise _too_wide(where, "it is a part of the system")
    if is_repository(context.names) or ".git" in where.split("/"):
        raise _too_wide(where, "it is the inside of a repository, whose configuration git on this machine obeys")
    for home in list_homes(context):
        if where == home or home.startswith(where + "/"):
            raise _too_wide(where, "it is a home, or has one inside")
        below = where.removeprefix(home + "/")
        if below != where and (is_credential_path(below) or has_credentials(below)):
            raise _too_wide(where, "it is where credentials are kept")


def list_homes(context: Context) -> tuple[str, ...]:
    """Returns the user's home, root's, and the home that the folder is in: under sudo they differ."""
    _, first, second, *_ = (*context.cwd.split("/"), "", "")
    others = (f"/{first}/{second}",) if first in ("home", "Users") and second else ()
    own = context.home.rstrip("/")
    return (*((own,) if own else ()), "/root", *others)


def _too_wide(where: str, cause: str) -> ProfileError:
    return ProfileError(
        "project_refused",
        f"{where} is not mounted as a project",
        detail=cause,
        hint="run it in a folder of the project's own, or with --profile moderate and no compatibility mode",
    )
