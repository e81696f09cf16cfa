"""`agentkernel trust`: lets an agentkernel.toml, as it is now, ask for more than the command line does."""

from __future__ import annotations

import os

from k8e.cli.agentkernel.output import say, show_table
from k8e.cli.agentkernel.plan import read_user_config
from k8e.cli.agentkernel.project.config_files import change_trusted, load_trusted, parse, read_bytes
from k8e.cli.process import print_json, write_all
from k8e.profiles.errors import ProfileError
from k8e.profiles.options import NO_OPTIONS
from k8e.profiles.text import clean
from k8e.profiles.trust import Widening, is_trusted, list_openings, revoke, trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from k8e.profiles.config.file import Config


def main(parsed: argparse.Namespace) -> int:
    if parsed.list:
        return show_trusted(as_json=parsed.json)
    path = os.path.realpath(parsed.file)
    change = take_back if parsed.revoke else give
    return change(parsed.file, path, as_json=parsed.json)


def give(named: str, path: str, *, as_json: bool) -> int:
    content = read_bytes(named, follow=False)
    config = parse(content, named)
    user = read_user_config()
    opens = [*list_openings(user.options if user else NO_OPTIONS, config), *find_links(config, os.path.dirname(path))]
    change_trusted(lambda entries: trust(entries, path, content))
    if as_json:
        print_json({"ok": True, "path": path, "opens": [{"where": each.where, "what": each.way} for each in opens]})
        return 0
    for each in opens:
        write_all(1, f"{clean(each.where)}: {clean(each.way)}\n".encode("utf-8", "backslashreplace"))
    say(f"{path} is trusted as it is now" + ("" if opens else "; it asks for nothing that needs it"))
    return 0


def find_links(config: Config, folder: str) -> Iterator[Widening]:
    """Files of the project that are links to others: only for a trusted file are they followed."""
    for each in config.options.files or ():
        place = os.path.normpath(os.path.join(folder, each.source))
        target = os.path.realpath(place)
        if target != place and place.startswith(f"{folder}/"):
            yield Widening(config.where("files"), f"{each.source} leads to {target}")


def take_back(named: str, path: str, *, as_json: bool) -> int:
    if not any(each.path == path for each in load_trusted()):
        raise ProfileError("not_trusted", f"{path} was not trusted", hint="agentkernel trust --list")
    change_trusted(lambda entries: revoke(entries, path))
    if as_json:
        print_json({"ok": True, "path": path})
    else:
        say(f"{path} is not trusted any more")
    return 0


def show_trusted(*, as_json: bool) -> int:
    rows = [(each.path, describe(each.path)) for each in load_trusted()]
    if as_json:
        print_json({"trusted": [{"path": path, "state": state} for path, state in rows]})
    else:
        show_table(("FILE", "STATE"), rows)
    return 0


def describe(path: str) -> str:
    try:
        content = read_bytes(path, follow=False)
    except ProfileError:
        return "gone"
    return "trusted" if is_trusted(load_trusted(), path, content) else "changed since, not trusted"
