"""The content that a session's workspace begins with: YAML in, checked entries out, then put into the sandbox.

    entries:
      - file: {path: src/main.py, content: "print(1)\\n", mode: 644}
      - dir: {path: data}
      - gitRepo: {path: app, repo: https://example.org/app.git, ref: v1.2}

A bare list of entries is the same. Every scalar is text: no YAML surprises (`no`, `1e3`, `0644`) reach a file, and a
mode is octal however it is written. Strict: a part that is not understood is an error that says where it stands.

Parsing a large manifest takes a while; a door calls it in a thread.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NoReturn

import yaml

from k8e.core.checks import MAX_PATH, check_content, check_path, encode, refuse
from k8e.core.errors import Fault, Kind
from k8e.core.model import MAX_MESSAGE, ManifestDir, ManifestEntry, ManifestFile, ManifestRepo
from k8e.core.sandbox.environment import Variables
from k8e.core.sandbox.output import HeadTail, read_into
from k8e.core.translation import translated
from k8e.engine import Place
from k8e.link.model import ExecSpec, Sandbox

CLONE_SECONDS: Final = 300.0
_SHOWN: Final = 2000  # bytes of what git said, in an error
MAX_TEXT: Final = 4 << 20
MAX_ENTRIES: Final = 1000

_MODE: Final = re.compile(r"(0o?)?[0-7]{1,4}")
_TEXT: Final = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
_MAPPING: Final = yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG
_REF: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+@-]{0,254}")


def parse_manifest(text: str) -> tuple[ManifestEntry, ...]:
    if len(text) > MAX_TEXT:
        refuse("manifest", f"has {len(text)} characters, the limit is {MAX_TEXT}")
    try:
        # Nodes, not objects: they know where they stand, and nothing is ever constructed from a tag.
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        refuse("manifest", f"{place}{getattr(error, 'problem', None) or 'not YAML'}")
    except RecursionError:
        refuse("manifest", "is nested too deeply")
    except (ValueError, OverflowError):  # an escape for a character beyond Unicode
        refuse("manifest", "not YAML")
    if root is None:
        return ()
    where = "manifest"
    if isinstance(root, yaml.MappingNode):
        fields = _read_fields(root, where, frozenset({"entries"}))
        if "entries" not in fields:
            _refuse_node(root, where, "has no entries")
        root, where = fields["entries"], "manifest.entries"
    if not isinstance(root, yaml.SequenceNode):
        _refuse_node(root, where, "must be a list")
    entries = tuple(_read_entry(node, f"{where}[{index}]") for index, node in enumerate(root.value))
    check_entries(entries)
    return entries


def check_entries(entries: Sequence[ManifestEntry]) -> None:
    """For entries that did not come as YAML, too."""
    if len(entries) > MAX_ENTRIES:
        refuse("manifest", f"has {len(entries)} entries, the limit is {MAX_ENTRIES}")
    size = 0
    for index, entry in enumerate(entries):
        field = f"manifest[{index}]"
        check_path(f"{field}.path", entry.path)
        if isinstance(entry, ManifestFile):
            size += len(check_content(f"{field}.content", entry.content))
            if not 0 <= entry.mode <= 0o7777:
                refuse(f"{field}.mode", "is not a file mode")
        elif isinstance(entry, ManifestRepo):
            _check_repo(field, entry)
    if size > MAX_MESSAGE:
        refuse("manifest", f"has files of {size} bytes, the limit is {MAX_MESSAGE}")


def _check_repo(field: str, entry: ManifestRepo) -> None:
    repo = encode(f"{field}.repo", entry.repo)
    # git is given "--" as well; an address like this is a mistake or an attempt.
    if not repo or repo.startswith(b"-") or len(repo) > MAX_PATH or any(byte < 0x20 for byte in repo):
        refuse(f"{field}.repo", "is not the address of a repository")
    if entry.ref and (not _REF.fullmatch(entry.ref) or ".." in entry.ref):
        refuse(f"{field}.ref", "is not the name of a branch, tag or commit")


# Nodes


def _refuse_node(node: yaml.Node, where: str, cause: str) -> NoReturn:
    refuse(where, f"{cause} (line {node.start_mark.line + 1})")


def _read_fields(node: yaml.Node, where: str, known: frozenset[str]) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode) or node.tag != _MAPPING:
        _refuse_node(node, where, "must be a mapping")
    fields: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else None
        if name not in known:
            _refuse_node(key, where, f"{str(name)[:64]!r} is not one of {', '.join(sorted(known))}")
        if name in fields:
            _refuse_node(key, where, f"{name!r} stands there twice")
        fields[str(name)] = value
    return fields


def _read_text(node: yaml.Node, where: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        _refuse_node(node, where, "must be text")
    if node.tag != _TEXT:
        _refuse_node(node, where, f"tag {node.tag[:64]!r} is not supported")
    try:
        # JSON is YAML, and spells what lies beyond 16 bits in two halves.
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        _refuse_node(node, where, "is not text")


class _Fields:
    """The fields of one entry, asked for by name."""

    def __init__(self, node: yaml.Node, where: str, known: frozenset[str]) -> None:
        self._nodes = _read_fields(node, where, known)
        self._node, self._where = node, where

    def require(self, name: str) -> str:
        if name not in self._nodes:
            _refuse_node(self._node, self._where, f"has no {name}")
        return self.get(name, "")

    def get(self, name: str, default: str) -> str:
        if name not in self._nodes:
            return default
        return _read_text(self._nodes[name], f"{self._where}.{name}")

    def get_mode(self) -> int:
        text = self.get("mode", "644")
        if not _MODE.fullmatch(text):
            _refuse_node(self._nodes["mode"], f"{self._where}.mode", f"{text[:64]!r} is not an octal file mode")
        return int(text.removeprefix("0o"), 8)


def _make_file(fields: _Fields) -> ManifestEntry:
    return ManifestFile(fields.require("path"), fields.get("content", "").encode(), fields.get_mode())


def _make_dir(fields: _Fields) -> ManifestEntry:
    return ManifestDir(fields.require("path"))


def _make_repo(fields: _Fields) -> ManifestEntry:
    return ManifestRepo(fields.require("path"), fields.require("repo"), fields.get("ref", ""))


KINDS: Final[Mapping[str, tuple[Callable[[_Fields], ManifestEntry], frozenset[str]]]] = {
    "file": (_make_file, frozenset({"path", "content", "mode"})),
    "dir": (_make_dir, frozenset({"path"})),
    "gitRepo": (_make_repo, frozenset({"path", "repo", "ref"})),
}


def _read_entry(node: yaml.Node, where: str) -> ManifestEntry:
    kinds = _read_fields(node, where, frozenset(KINDS))
    if len(kinds) != 1:
        _refuse_node(node, where, f"must be one of {', '.join(KINDS)}")
    ((kind, fields),) = kinds.items()
    make, known = KINDS[kind]
    return make(_Fields(fields, f"{where}.{kind}", known))


def describe_entry(entry: ManifestEntry) -> str:
    """For people: which entry it is, without what is in it."""
    kind = {ManifestFile: "file", ManifestDir: "dir", ManifestRepo: "gitRepo"}[type(entry)]
    return f"{kind} {entry.path}"


def list_steps(entry: ManifestRepo, path: bytes) -> Iterator[tuple[bytes, ...]]:
    """The exact commands that bring a repository into a workspace."""
    repo = encode("repo", entry.repo)
    if not entry.ref:
        yield (b"git", b"clone", b"--quiet", b"--depth=1", b"--", repo, path)
        return
    # A ref may be a branch, a tag or a commit; only fetch takes all three.
    yield (b"git", b"clone", b"--quiet", b"--depth=1", b"--no-checkout", b"--", repo, path)
    yield (b"git", b"-C", path, b"fetch", b"--quiet", b"--depth=1", b"origin", entry.ref.encode())
    yield (b"git", b"-C", path, b"checkout", b"--quiet", b"--detach", b"FETCH_HEAD")


async def make_workdir(sandbox: Sandbox, place: Place, path: str) -> None:
    if path:
        with translated("making the directory that its commands start in"):
            await sandbox.mkdir(path.encode(), identity=place.file_owner)


async def apply_manifest(sandbox: Sandbox, place: Place, env: Variables, entries: Sequence[ManifestEntry]) -> None:
    for index, entry in enumerate(entries):
        try:
            with translated(describe_entry(entry)):
                await _apply(sandbox, place, env, entry)
        except Fault as fault:
            raise Fault(
                Kind.FAILED,
                "manifest_failed",
                f"manifest entry {index} ({describe_entry(entry)}) failed; the session was not created",
                detail=fault.detail or fault.error,
                hint=fault.hint,
                field=f"manifest[{index}]",
            ) from fault


async def _apply(sandbox: Sandbox, place: Place, env: Variables, entry: ManifestEntry) -> None:
    path = check_path("path", entry.path)
    identity = place.file_owner
    if isinstance(entry, ManifestDir):
        await sandbox.mkdir(path, identity=identity)
        return
    parent = path.rstrip(b"/").rpartition(b"/")[0] or b"/"
    await sandbox.mkdir(parent, identity=identity)
    if isinstance(entry, ManifestFile):
        await sandbox.write_file(path, entry.content, mode=entry.mode, identity=identity)
    else:
        await _clone(sandbox, place, env, entry, path)


async def _clone(sandbox: Sandbox, place: Place, env: Variables, entry: ManifestRepo, path: bytes) -> None:
    variables = tuple(dict((*place.env, *env, (b"GIT_TERMINAL_PROMPT", b"0"))).items())
    for argv in list_steps(entry, path):
        spec = ExecSpec(argv, variables, place.workspace, identity=place.user, stdin=False, timeout=CLONE_SECONDS)
        process = await sandbox.start(spec)
        output = HeadTail(_SHOWN)
        _, _, outcome = await asyncio.gather(
            read_into(process.stdout, output), read_into(process.stderr, output), process.wait()
        )
        if outcome.exit_code != 0:
            said = _hide_credentials(output.take().decode(errors="replace").strip())
            detail = said or f"{outcome.cause.value}, no output"
            hint = "Are the address and the ref right, and may the session reach the host (--allowed-hosts)?"
            raise Fault(Kind.FAILED, "git_failed", "git failed", detail=detail, hint=hint)


def _hide_credentials(text: str) -> str:
    return re.sub(r"://[^/@\s]*@", "://***@", text)
