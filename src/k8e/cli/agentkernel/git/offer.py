"""At the end of a run: says that the command has committed, and keeps the commits where the sandbox goes."""

from __future__ import annotations

from k8e.cli.agentkernel.output import say
from k8e.cli.client import LocalClient, SessionName
from k8e.cli.process import Failure, ServiceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.agentkernel.git.repository import Repository

_SHOWN = 5


def offer_commits(sandbox: str, repository: Repository, since: float, *, stays: bool) -> None:
    """Nothing in the project's repository changes. The run's exit code does not either: the command has ended. Where
    the sandbox does not stay, it is gone afterwards."""
    try:
        look_for_commits(sandbox, repository, since, stays=stays)
    finally:
        if not stays:
            try:
                LocalClient().destroy_session(SessionName(sandbox))
            except Failure:
                pass  # it is gone already, or goes when this process ends


def look_for_commits(sandbox: str, repository: Repository, since: float, *, stays: bool) -> None:
    try:
        if not has_changed(sandbox, repository, since):
            return
        from k8e.cli.agentkernel.git.export import find_commits, keep_commits

        refs, left_out = (find_commits if stays else keep_commits)(sandbox, repository)
    except Failure as error:
        if error.code != "git_missing":  # then no program of the sandbox's committed either
            say(f"what it committed is lost: {error.error} [{error.code}] {error.detail}".rstrip())
        return
    if refs:
        names = [ref.removeprefix("refs/").removeprefix("heads/") for ref in refs]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        say(f"it committed ({', '.join(names[:_SHOWN])}{more}): agentkernel git pull {sandbox} brings that here")
    if left_out:
        say(f"{left_out} refs are left out: their names cannot be brought back")


def has_changed(sandbox: str, repository: Repository, since: float) -> bool:
    """Whether refs of the sandbox's copy were written. Only the agent is asked: no program is started."""
    client = LocalClient()
    folders = [f"{repository.inside}/logs", f"{repository.inside}/refs"]
    if repository.linked:
        folders.append(f"{repository.linked_inside}/logs")  # of a detached HEAD
    for folder in folders:
        try:
            found = client.list_files(SessionName(sandbox), folder, since)
        except ServiceError:
            continue  # there is no such directory
        if b'"files": []' not in found.text:
            return True
    return False
