"""The commands of `k8e sandbox` that copy, make and remove files of a session."""

from __future__ import annotations

from k8e.cli.client import SessionName, open_client
from k8e.cli.process import Failure
from k8e.cli.sandbox.sessions import name_session
from k8e.cli.view import show, show_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from k8e.cli.transfer.transfer import Transfer

SHOWN = 100  # of what was left out


def make_directory(options: argparse.Namespace) -> int:
    return show(open_client().create_directory(name_session(options), options.path))


def remove(options: argparse.Namespace) -> int:
    return show(open_client().remove_file(name_session(options), options.path, recursive=options.recursive))


def copy(options: argparse.Namespace) -> int:
    from k8e.cli.transfer.download import Download
    from k8e.cli.transfer.transfer import split_place
    from k8e.cli.transfer.upload import Upload

    source, destination = split_place(options.source), split_place(options.destination)
    if bool(source[0]) == bool(destination[0]):
        hint = "k8e sandbox cp SID:PATH DESTINATION, or cp SOURCE SID:PATH; a file here with a colon is ./a:b"
        raise Failure("usage", "one of both is in a session (SID:PATH), the other one here", hint=hint)
    session_id, path = source if source[0] else destination
    session = SessionName(session_id, options.tenant_id, options.owner)
    transfer: Transfer
    if source[0]:
        transfer = download = Download(open_client(), session, path)
        download.copy(options.destination)
    else:
        transfer = upload = Upload(open_client(), session, path)
        upload.copy(options.source)
    counts = {"bytes": transfer.bytes, "files": transfer.files}
    if transfer.left_out:
        names = [{"path": name, "reason": reason} for name, reason in transfer.left_out[:SHOWN]]
        raise Failure(
            "entries_left_out",
            f"{len(transfer.left_out)} entries were not copied, everything else was",
            detail="; ".join(f"{one['path']}: {one['reason']}" for one in names[:3]),
            hint="links and special files are not copied: pack them with tar inside, and copy the archive",
            more={"ok": False, **counts, "left_out": names},
        )
    show_value({"ok": True, **counts})
    return 0
