"""Builds the standalone program: one file for Linux, macOS and Windows, in pure Python (src/k8e/cli/standalone/).

    build_standalone.py FOLDER      makes FOLDER/k8e-sandbox.pyz

It has the modules that the remote commands import, and nothing else: they are found by reading their imports. A module
that is compiled, or a library that is not in the list below, ends the build. The same sources make the same bytes.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
NAME = "k8e-sandbox.pyz"
# Commands name what they run by texts, which no import shows: these are all that the program needs.
SEEDS = ("standalone", "remote", "sandbox", "transfer", "view")
MODULES = ("commands", "images.commands", "keys", "manual", "process", "run")
LIBRARIES = ("ecdsa", "google.protobuf", "h2", "hpack", "hyperframe", "idna", "six", "yaml")
# Reached by imports of functions that the program never calls.
LEFT_OUT = (
    "k8e.daemon",
    "k8e.engine.local",
    "k8e.core.store",
    "k8e.cli.agentkernel",
    "k8e.cli.client.launch",
    "k8e.cli.install",
    "k8e.cli.mcp",
    "k8e.cli.remote.mcp",
    "k8e.cli.top",
    "k8e.identity.authority",
)
COMPILED = ("cryptography", "grpc")  # imported where the program has its own, or is never
# Python compiles what it imports from an archive at every start, which takes longer than all else. So the first start
# unpacks it into the user's own cache, where Python keeps the compiled form; where that cannot be, it runs as it is.
START = """\
import sys
if sys.version_info < (3, 11):
    sys.exit("k8e-sandbox needs Python 3.11 or newer; this is %d.%d" % sys.version_info[:2])
import os
def find_cache(archive):
    import hashlib
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    with open(archive, "rb") as file:
        return os.path.join(base, "k8e-sandbox", hashlib.sha256(file.read()).hexdigest()[:20])
def is_own(folder):
    found = os.lstat(folder)
    return not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and found.st_mode & 0o170022 == 0o040000)
def unpack(archive, cache):
    import tempfile, zipfile
    os.makedirs(os.path.dirname(cache), 0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(cache)) as draft:
        with zipfile.ZipFile(archive) as file:
            file.extractall(os.path.join(draft, "all"))
        os.rename(os.path.join(draft, "all"), cache)
archive = sys.path[0]
try:
    cache = find_cache(archive)
    if not os.path.isdir(cache):
        unpack(archive, cache)
    if is_own(os.path.dirname(cache)) and is_own(cache):
        sys.path.insert(0, cache)
except OSError:
    pass
from k8e.cli.standalone.main import main
sys.exit(main())
"""
MOMENT = (2020, 1, 1, 0, 0, 0)


class BuildFailed(Exception):
    pass


def find_file(module: str) -> Path | None:
    path = SOURCES / module.replace(".", "/")
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def list_seeds() -> Iterator[str]:
    for package in SEEDS:
        for file in sorted((SOURCES / "k8e" / "cli" / package).glob("*.py")):
            yield f"k8e.cli.{package}.{file.stem}".removesuffix(".__init__")
    yield from (f"k8e.cli.{name}" for name in MODULES)


def is_left_out(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in LEFT_OUT)


def list_imports(module: str, file: Path) -> Iterator[str]:
    """All that it may import, also in functions; not what only a type checker does."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def find_modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    known = {*sys.stdlib_module_names, *COMPILED, *(name.partition(".")[0] for name in LIBRARIES)}
    waiting = [name for name in list_seeds() if not is_left_out(name)]
    while waiting:
        module = waiting.pop()
        top = module.partition(".")[0]
        if top == "k8e":
            file = find_file(module)
            if file is None or module in found or is_left_out(module):
                continue
            found[module] = file
            waiting += [module.rpartition(".")[0]] if "." in module else []
            waiting += list_imports(module, file)
        elif top not in known:
            raise BuildFailed(f"{module} is not among the libraries of the standalone program")
    return found


def list_library(name: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildFailed(f"{name} is not installed: `make setup`")
    if spec.submodule_search_locations is None:
        yield f"{name}.py", Path(spec.origin)
        return
    folder = Path(spec.origin).parent
    for file in sorted(folder.rglob("*.py")):
        if not {"testdata", "compiler"} & set(file.relative_to(folder).parts):
            yield f"{name.replace('.', '/')}/{file.relative_to(folder)}", file


def build(folder: Path) -> Path:
    # A folder of an archive is no package without one.
    contents = {"__main__.py": START.encode(), "google/__init__.py": b""}
    for file in find_modules().values():
        contents[str(file.relative_to(SOURCES))] = file.read_bytes()
    for library in LIBRARIES:
        contents |= {name: file.read_bytes() for name, file in list_library(library)}
    version = metadata.version("k8e")
    contents[f"k8e-{version}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: k8e\nVersion: {version}\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / NAME
    draft = target.with_name(f".{NAME}.{os.getpid()}")
    with draft.open("wb") as output:
        output.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(contents):
                entry = zipfile.ZipInfo(name, MOMENT)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, contents[name])
    draft.chmod(0o755)
    return draft.replace(target)


if __name__ == "__main__":
    try:
        made = build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
    except BuildFailed as error:
        sys.exit(f"build_standalone: {error}")
    print(f"Successfully built {made}")
