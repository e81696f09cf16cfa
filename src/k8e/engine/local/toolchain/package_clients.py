"""Asks pip, npm and Node on this machine which indexes they use and which certificates they trust.

They are asked, because only they know which of their files and variables count. That takes half a second, so the
answers are kept, for as long as nothing they were made from has changed. No answer holds a credential: those are
dropped before anything is kept.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from k8e.damage import read_own
from k8e.engine import EngineError
from k8e.engine.local.system.tool import find_tool, try_tool

SYSTEM_PYTHON = Path("/usr/bin/python3")  # of sandboxes, too
_FORM = 1  # of what is kept; another number forgets it
_DEADLINE = 30.0
_VARIABLES = re.compile(r"PIP_\w+|NPM_CONFIG_\w+|npm_config_\w+|XDG_CONFIG_\w+|HOME", re.ASCII)
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----\s+([A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----", re.ASCII)

# Of all settings those that say where packages come from. Not here: passwords, tokens, client keys, and proxies,
# which reach any host on behalf of any caller.
_PIP_LISTS = ("extra-index-url", "find-links", "trusted-host")
_PIP_SETTINGS = ("index-url", "no-index", "cert", "timeout", "default-timeout", "retries", *_PIP_LISTS)
_PIP_SECTIONS = ("global", "install", ":env:")  # the later wins, as in pip
_NPM_SETTINGS = ("registry", "strict-ssl", "replace-registry-host", "cafile", "ca", "audit", "fund")
_NPM_SCOPE = re.compile(r"@[A-Za-z0-9._~-]+:registry", re.ASCII)

# pip is the one of the tools layer where there is one: the one that sandboxes use.
_ASK_PIP = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import pip
from pip._internal.models.index import PyPI
print(repr((pip.__file__, PyPI.simple_url, PyPI.file_storage_domain)), flush=True)
sys.argv = ["pip", "config", "list"]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_ASK_NODE = "for (const text of require('tls').rootCertificates) console.log(text)"


@dataclass(frozen=True, slots=True)
class Answers:
    """Plain data; settings have the clients' own names. Empty: the machine does not have that client."""

    pip: Mapping[str, str] = field(default_factory=dict)
    pip_index: str = ""  # that pip uses when nothing is configured
    pip_files: str = ""  # the host on which that index keeps its files
    npm: Mapping[str, str] = field(default_factory=dict)
    node_roots: tuple[str, ...] = ()  # digests of the certificates that Node trusts by itself
    complaints: tuple[str, ...] = ()
    made_from: tuple[str, ...] = ()  # files


def strip_credentials(url: str) -> str:
    """Without user, password, query and fragment; empty for what is no http URL of a host."""
    try:
        parts = urlsplit(url.strip())
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable():
            return ""
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def certificates(text: str) -> dict[str, str]:
    """The certificates in a PEM file by digest, in order, each in one form. Anything else in it is left out."""
    found = {}
    for body in _CERTIFICATE.findall(text):
        data = "".join(body.split())
        lines = "\n".join(data[start : start + 64] for start in range(0, len(data), 64))
        digest = hashlib.sha256(data.encode()).hexdigest()
        found[digest] = f"-----BEGIN CERTIFICATE-----\n{lines}\n-----END CERTIFICATE-----\n"
    return found


async def ask_clients(tools: Path, memory: Path | None, environ: Mapping[str, str]) -> Answers:
    """`memory` is the file in which answers are kept."""
    env = choose_variables(environ)
    if memory is not None:
        kept = await asyncio.to_thread(_recall, memory, tools, env)
        if kept is not None:
            return kept
    (pip, index, files, pip_from), (npm, npm_from), roots = await asyncio.gather(
        _ask_pip(tools, env), _ask_npm(env), _ask_node()
    )
    complaints = [answer for answer in (pip, npm) if isinstance(answer, str)]
    answers = Answers(
        pip=pip if isinstance(pip, dict) else {},
        pip_index=index,
        pip_files=files,
        npm=npm if isinstance(npm, dict) else {},
        node_roots=tuple(roots),
        complaints=tuple(complaints),
        made_from=(*pip_from, *npm_from),
    )
    # Something that went wrong (a machine out of memory) may go right the next time.
    if memory is not None and not complaints:
        await asyncio.to_thread(remember_answers, memory, tools, env, answers)
    return answers


def choose_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that their answers may depend on."""
    return {key: value for key, value in environ.items() if _VARIABLES.fullmatch(key)}


async def _ask_pip(tools: Path, env: Mapping[str, str]) -> tuple[dict[str, str] | str, str, str, list[str]]:
    if not await asyncio.to_thread(SYSTEM_PYTHON.exists):
        return {}, "", "", []
    try:
        told = await try_tool(
            SYSTEM_PYTHON, "-I", "-c", _ASK_PIP, tools / "python", env=env, capture=True, deadline=_DEADLINE
        )
        first, *lines = told.output.splitlines()
        where, index, files = ast.literal_eval(first)
        if told.status != 0:
            return f"pip config list: exit status {told.status}", "", "", []
    except (EngineError, OSError, ValueError, SyntaxError) as error:
        return f"pip config list: {error}", "", "", []
    return read_pip_settings(lines), str(index), str(files), [str(where)]


def read_pip_settings(lines: Iterable[str]) -> dict[str, str]:
    """Reads the settings of `pip install` from what `pip config list` prints: `section.key='value'`."""
    sections: dict[str, dict[str, str]] = {section: {} for section in _PIP_SECTIONS}
    for line in lines:
        path, _, value = line.partition("=")
        section, _, key = path.rpartition(".")
        if section in sections and key in _PIP_SETTINGS:
            with contextlib.suppress(ValueError, SyntaxError):
                sections[section][key] = str(ast.literal_eval(value))
    settings: dict[str, str] = {}
    for section in _PIP_SECTIONS:
        settings.update(sections[section])
    if settings.get("no-index", "").lower() in ("0", "n", "no", "f", "false", "off"):
        del settings["no-index"]
    for key in ("extra-index-url", "find-links", "index-url"):
        if key in settings:
            settings[key] = " ".join(filter(None, map(strip_credentials, settings[key].split())))
    return settings


async def _ask_npm(env: Mapping[str, str]) -> tuple[dict[str, str] | str, list[str]]:
    npm = find_tool("npm")
    if npm is None:
        return {}, []
    try:
        told = await try_tool(npm, "config", "ls", "--long", "--logs-max=0", env=env, capture=True, deadline=_DEADLINE)
    except (EngineError, OSError) as error:
        return f"npm config ls: {error}", []
    if told.status != 0:
        return f"npm config ls: exit status {told.status}", []
    answer = parse_npm_listing(told.output)
    files = [str(answer[key]) for key in ("userconfig", "globalconfig") if isinstance(answer.get(key), str)]
    return read_npm_settings(answer), files


def parse_npm_listing(text: str) -> dict[str, object]:
    """`key = JSON` for what counts; comments for the rest. (Its --json form leaves out URLs with a password.)"""
    answer: dict[str, object] = {}
    for line in text.splitlines():
        key, equals, value = line.partition(" = ")
        if equals and not key.startswith(";"):
            with contextlib.suppress(ValueError):
                answer[key] = json.loads(value)
    return answer


def read_npm_settings(answer: Mapping[str, object]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for key, value in answer.items():
        if value is None or (key not in _NPM_SETTINGS and not _NPM_SCOPE.fullmatch(key)):
            continue
        if key == "ca":
            texts = value if isinstance(value, list) else [value]
            settings[key] = "".join(certificates("\n".join(map(str, texts)).replace("\\n", "\n")).values())
        elif isinstance(value, bool):
            settings[key] = "true" if value else "false"
        elif isinstance(value, str) and value.isprintable():
            settings[key] = strip_credentials(value) if key == "registry" or ":" in key else value
    return {key: value for key, value in settings.items() if value}


async def _ask_node() -> list[str]:
    node = find_tool("node")
    if node is None:
        return []
    try:
        told = await try_tool(node, "-e", _ASK_NODE, capture=True, deadline=_DEADLINE)
    except (EngineError, OSError):
        return []  # then the sandbox's Node is given all certificates
    return list(certificates(told.output))


# What is kept ---------------------------------------------------------------------------------------------------------


def _recall(memory: Path, tools: Path, env: Mapping[str, str]) -> Answers | None:
    try:
        record = json.loads(read_own(memory))
        kept: dict[str, Any] = dict(record["answers"])
        for key, value in kept.items():
            if isinstance(value, list):
                kept[key] = tuple(value)
        answers = Answers(**kept)
        same = record["fingerprint"] == _fingerprint(tools, env, answers.made_from)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return answers if same else None


def remember_answers(memory: Path, tools: Path, environ: Mapping[str, str], answers: Answers) -> None:
    record = {
        "fingerprint": _fingerprint(tools, choose_variables(environ), answers.made_from),
        "answers": asdict(answers),
    }
    memory.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=memory.parent, prefix=".clients-")  # readable by its owner only
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(record, file)
        if memory.is_dir():
            shutil.rmtree(memory)  # of our own making nothing there is one
        os.rename(partial, memory)
    except BaseException:
        os.unlink(partial)
        raise


def _fingerprint(tools: Path, env: Mapping[str, str], made_from: Iterable[str]) -> str:
    """Hashes everything that an answer could depend on. Files that do not exist count too: they may be made."""
    home = env.get("HOME", "/root")
    config = env.get("XDG_CONFIG_HOME") or f"{home}/.config"
    folders = (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    names = [f"{folder}/pip/pip.conf" for folder in folders]
    names += ["/etc/pip.conf", f"{home}/.pip/pip.conf", f"{config}/pip/pip.conf", "/usr/pip.conf", "/.npmrc"]
    names += [env.get("PIP_CONFIG_FILE", ""), f"{home}/.npmrc", f"{tools}/python/pip/__init__.py", str(SYSTEM_PYTHON)]
    for tool in ("npm", "node"):
        path = os.path.realpath(find_tool(tool) or f"/usr/bin/{tool}")
        names += [
            path,
            f"{path}/../../package.json",
            f"{path}/../../npmrc",
        ]  # of npm: its version, its builtin settings
    total = hashlib.sha256(repr((_FORM, sorted(env.items()))).encode())
    for name in sorted({*filter(None, names), *made_from}):
        total.update(f"\0{name}\0{_describe(name)}".encode(errors="surrogateescape"))
    return total.hexdigest()


def _describe(name: str) -> str:
    try:
        status = os.stat(os.path.normpath(name))
        small = status.st_size < 1 << 20
        content = hashlib.sha256(Path(os.path.normpath(name)).read_bytes()).hexdigest() if small else ""
    except OSError as error:
        return str(error.errno)
    return f"{status.st_mtime_ns} {status.st_size} {content}"
