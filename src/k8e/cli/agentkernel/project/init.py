"""`agentkernel init`: an agentkernel.toml for the project in this folder, with its keys explained."""

from __future__ import annotations

import os

from k8e.cli.agentkernel.output import say
from k8e.cli.agentkernel.plan import FILE_NAME, look_around
from k8e.cli.process import Failure, write_all
from k8e.profiles.config.file import read_config
from k8e.profiles.detection import detect
from k8e.profiles.options import NO_OPTIONS
from k8e.profiles.sandbox_policy import NAME
from k8e.profiles.trust import find_widenings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def main(parsed: argparse.Namespace) -> int:
    context = look_around()
    found = detect((), context.names)
    text = write_file(
        name=make_name(parsed.name or os.path.basename(context.cwd)),
        runtime=found.language or "base",
        reason=found.reason,
        agent=parsed.agent,
        profile=parsed.profile,
        mode=parsed.compatibility_mode,
    )
    config = read_config(text, FILE_NAME)
    if parsed.dry_run:
        write_all(1, text.encode())
        return 0
    put(text, force=parsed.force)
    say(f"wrote {FILE_NAME} for {found.language or 'no language in particular'} ({found.reason})")
    if find_widenings(NO_OPTIONS, NO_OPTIONS, config):
        say("it asks for more than a sandbox usually gets: `agentkernel trust` lets it")
    return 0


def make_name(text: str) -> str:
    """The folder's name as far as it can be a sandbox's."""
    name = "".join(letter if letter in NAME else "-" for letter in text).strip("-")[:63]
    return name or "project"


def write_file(*, name: str, runtime: str, reason: str, agent: str, profile: str, mode: str) -> str:
    chosen = f'compatibility_mode = "{mode}"' if mode else f'# compatibility_mode = "{agent}"'
    return f"""\
# How commands of this project are run in sandboxes: docs/agentkernel.md explains every key.
# Found in a folder this file can only narrow what the command line asks for; to let it widen that,
# look at it and run `agentkernel trust`, or name it with --config.

[sandbox]
name = "{name}"  # for `agentkernel sandbox create` without a name
# The image is the one that fits the command, or else this folder ({reason}).
# runtime = "{runtime}"  # always this language's, whatever the command
# base_image = "python:3.12-alpine"  # always this one

[agent]
preferred = "{agent}"
{chosen}  # mounts this folder at /workspace; the vendor's hosts and the package registries

[security]
profile = "{profile}"  # restrictive, moderate or permissive
# network = false  # nothing but loopback
# allowed_hosts = ["api.example.com", "*.example.org:8443"]  # exactly these
# mount_cwd = true
# read_only = true

[resources]
# cpus = 1
# memory = "1g"
# disk = "2g"
# pids = 512
"""


_FOLDER = "may you write in this folder? --dry-run prints it instead"


def put(text: str, *, force: bool) -> None:
    """A new file, or with `force` instead of a file; never through a link."""
    if force and not os.path.islink(FILE_NAME):
        try:
            os.unlink(FILE_NAME)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise Failure(
                "file_unwritable", f"{FILE_NAME} cannot be replaced", detail=str(error), hint=_FOLDER
            ) from error
    try:
        descriptor = os.open(FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except FileExistsError as error:
        hint = "look at it; --force replaces it" if not os.path.islink(FILE_NAME) else "it is a link: remove it first"
        raise Failure("file_exists", f"there is an {FILE_NAME} already", hint=hint) from error
    except OSError as error:
        raise Failure("file_unwritable", f"{FILE_NAME} cannot be written", detail=str(error), hint=_FOLDER) from error
    try:
        write_all(descriptor, text.encode())
    finally:
        os.close(descriptor)
