"""`agentkernel cp`: files and directories, into a sandbox and out of it."""

from __future__ import annotations

from k8e.cli.agentkernel.exec import explain
from k8e.cli.agentkernel.leading_options import show_help, take_options, wants_help
from k8e.cli.agentkernel.output import say
from k8e.cli.client import LocalClient, SessionName
from k8e.cli.process import FAILED, Failure, ServiceError
from k8e.cli.transfer.download import Download
from k8e.cli.transfer.transfer import split_place
from k8e.cli.transfer.upload import Upload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.transfer.transfer import Transfer

USAGE = "cp SOURCE NAME:PATH, or cp NAME:PATH DESTINATION"
ABOUT = """\
Copies a file, or a folder with everything in it, into the sandbox NAME or out of it. A PATH that does not begin with /
begins in /workspace. Into a folder that is there already, or a destination that ends in /, it is copied under its own
name. Permissions are kept; links and special files are left out, and said (exit code 1)."""

SHOWN = 10


def main(words: list[str]) -> int:
    if wants_help(words, {}):
        return show_help(USAGE, ABOUT, {})
    rest = take_options(words, {}, object())
    if len(rest) == 2:
        source, destination = map(split_place, rest)
        name, path = source if source[0] else destination
        if bool(source[0]) != bool(destination[0]):
            kind, here = (Download, rest[1]) if source[0] else (Upload, rest[0])
            transfer = kind(LocalClient(), SessionName(name), path)
            try:
                transfer.copy(here)
            except ServiceError as error:
                raise explain(error, name) from None
            return report(transfer)
    raise Failure("usage", "one of both is in a sandbox, the other one here", hint=f"agentkernel {USAGE}")


def report(transfer: Transfer) -> int:
    for name, reason in transfer.left_out[:SHOWN]:
        say(f"left out: {name} ({reason})")
    if len(transfer.left_out) > SHOWN:
        say(f"left out: {len(transfer.left_out) - SHOWN} more")
    return FAILED if transfer.left_out else 0
