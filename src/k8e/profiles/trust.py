"""How far a file that lies in the working directory is believed. Pure.

A cloned repository brings an agentkernel.toml along. Unless somebody named that file (`--config`) or trusts it
(`agentkernel trust`), it may only take away from what the command line and the user's own configuration give: it is
compared with what there would be without it, in every way in which a cage can be wider.
"""

from __future__ import annotations

from k8e.profiles.credentials import is_private
from k8e.profiles.effective import build_cage
from k8e.profiles.errors import ProfileError
from k8e.profiles.languages import IMAGES
from k8e.profiles.permissions import settle
from k8e.profiles.record import Record
from k8e.profiles.wishes import NOTHING_SAID, Wishes, merge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from k8e.profiles.config import Config
    from k8e.profiles.effective import Cage
    from k8e.profiles.scene import Scene


def decide(
    asked: Wishes,
    scene: Scene,
    command: Sequence[str] = (),
    *,
    user: Wishes = NOTHING_SAID,
    file: Config | None = None,
    trusted: bool = False,
    name: str = "",
    persistent: bool = False,
) -> Cage:
    """The cage for a command. Raises ProfileError; `widening_refused` when a file that is not trusted asks for more."""
    if file is None:
        return build_cage(asked, scene, command, others=(user,), name=name, persistent=persistent)
    if not trusted:
        refuse_widening(asked, user, file)
    return build_cage(asked, scene, command, others=(file.wishes, user), name=name, persistent=persistent)


class Widening(Record):
    where: str  # file, line and key
    way: str  # what it would open


def refuse_widening(asked: Wishes, user: Wishes, file: Config) -> None:
    found = find_widenings(asked, user, file)
    if not found:
        return
    raise ProfileError(
        "widening_refused",
        f"{file.file} asks for more than you do, and nobody has said that it may",
        detail="; ".join(f"{each.where} ({each.way})" for each in found),
        hint=f"look at it, then `agentkernel trust {file.file}`, or name it: --config {file.file}",
    )


def find_widenings(asked: Wishes, user: Wishes, file: Config) -> tuple[Widening, ...]:
    without = settle(merge((asked, user)))
    found = []
    for wish in file.wishes.said:
        single = settle(merge((asked, file.wishes.only(wish), user)))
        found += [Widening(file.where(wish), way) for way in single.wider_than(without)]
    if not found:  # no key alone, but perhaps all of them together
        together = settle(merge((asked, file.wishes, user)))
        found += [Widening(file.file, way) for way in together.wider_than(without)]
    return (*found, *_find_image(asked, user, file), *_find_files(file))


def _find_image(asked: Wishes, user: Wishes, file: Config) -> Iterable[Widening]:
    """An image of a name that the file chooses is fetched with the user's credentials from where the file says, and
    its content is then in the hands of the project's code. Those of the table are everybody's."""
    image = file.wishes.image
    if image is None or image in IMAGES or asked.image is not None or asked.language is not None:
        return
    if image != user.image:
        yield Widening(file.where("image"), f"the image {image} is fetched with your credentials")


def _find_files(file: Config) -> Iterable[Widening]:
    for each in file.wishes.files or ():
        if each.source.startswith(("/", "~")) or ".." in each.source.split("/"):
            yield Widening(file.where("files"), f"{each.source} is not of the project")
        elif is_private(each.source):
            yield Widening(file.where("files"), f"{each.source} looks like somebody's secret")


# What the user trusts: files by place and content, so that neither a changed file nor a copy elsewhere is meant.


class Trusted(Record):
    path: str
    sha256: str


def read_trusted(text: str) -> tuple[Trusted, ...]:
    """What cannot be understood is not trusted."""
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
