"""What the repository promises about itself: layers that can fail, a lock without addresses."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Layers:
    """A copy of the package to break, and the linter's verdict on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "src" / "k8e", folder / "k8e", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / ".importlinter", folder)

    def add_module(self, name: str, content: str = "") -> None:
        path = self.folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        for parent in path.relative_to(self.folder).parents[:-1]:
            (self.folder / parent / "__init__.py").touch()

    def check(self) -> tuple[int, str]:
        command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, "PYTHONPATH": str(self.folder)}, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    return Layers(tmp_path)


ROOMS = {
    "k8e.cli.main": "import k8e.core.service\n",
    "k8e.doors.grpc": "import grpc\nimport k8e.core.service\n",
    "k8e.profiles.sandbox_policy": "import k8e.policy\n",
    "k8e.core.service": "import k8e.engine.protocol\nimport k8e.link.model\n",
    "k8e.engine.protocol": "import k8e.link.model\n",
    "k8e.engine.local.network": "import k8e.link.model\n",
    "k8e.engine.local.runtime.runtime": "import k8e.engine.protocol\nimport k8e.engine.local.layout\n",
    "k8e.engine.kubernetes.pods": "import lightkube\nimport k8e.engine.protocol\nimport k8e.engine.local.network\n",
}

OFFENCES = [
    ("k8e.link.offender", "import k8e.conformance"),
    ("k8e.link.offender", "import k8e.core.service"),
    ("k8e.link.offender", "import http.client"),
    ("k8e.conformance.offender", "import k8e.engine.local.runtime.runtime"),
    ("k8e.engine.conformance.offender", "import k8e.engine.local.runtime.runtime"),
    ("k8e.core.sessions.offender", "import grpc.aio"),
    ("k8e.core.sessions.offender", "from starlette.routing import Route"),
    ("k8e.core.sessions.offender", "import mcp"),
    ("k8e.core.sessions.offender", "import lightkube"),
    ("k8e.core.sessions.offender", "import k8e.doors.grpc"),
    ("k8e.core.sessions.offender", "import k8e.engine.local.runtime.runtime"),
    ("k8e.core.sessions.offender", "def lazily() -> None:\n    import k8e.engine.kubernetes.pods"),
    ("k8e.doors.offender", "import k8e.engine.local.runtime.runtime"),
    ("k8e.doors.offender", "import k8e.cli.main"),
    ("k8e.doors.offender", "import k8e.cluster.build"),
    ("k8e.engine.kubernetes.offender", "import k8e.cluster.build"),
    ("k8e.doors.http.offender", "import k8e.doors.mcp.endpoint"),
    ("k8e.doors.request_memory", "import k8e.doors.http.server"),
    ("k8e.engine.local.runtime.offender", "import k8e.core.service"),
    ("k8e.engine.local.runtime.offender", "import k8e.engine.kubernetes.pods"),
    ("k8e.engine.kubernetes.usage", "import k8e.engine.local.runtime.runtime"),
    ("k8e.profiles.offender", "import k8e.core.service"),
    ("k8e.profiles.offender", "import k8e.settings"),
    ("k8e.policy.offender", "import k8e.profiles.sandbox_policy"),
    ("k8e.unplaced", ""),
    ("k8e.core.runs.offender", "import k8e.core.approvals.approvals"),
    ("k8e.core.sessions.offender", "import k8e.core.runs.runs"),
    ("k8e.core.pool.offender", "import k8e.core.sessions.live"),
    ("k8e.core.egress.offender", "import k8e.core.pool.pool"),
    ("k8e.core.store.offender", "import k8e.core.parts"),
    ("k8e.core.access.offender", "import k8e.core.store.store"),
    ("k8e.core.log.offender", "import k8e.core.access.access"),
    ("k8e.core.sandbox.offender", "import k8e.core.log.audit"),
    ("k8e.core.unplaced", ""),
    ("k8e.engine.local.system.offender", "import k8e.engine.local.layout"),
    ("k8e.engine.local.runtime.offender", "import k8e.engine.local.record"),
    ("k8e.engine.local.disk.offender", "import k8e.engine.local.roots.roots"),
    ("k8e.engine.local.toolchain.offender", "import k8e.engine.local.mounts.mounts"),
    ("k8e.engine.local.roots.offender", "import k8e.engine.local.launcher"),
    ("k8e.engine.local.unplaced", ""),
    ("k8e.engine.kubernetes.names", "import k8e.engine.kubernetes.engine"),
    ("k8e.engine.kubernetes.unplaced", ""),
]


class TestLayers:
    def test_hold_for_the_package_as_it_is(self, layers: Layers) -> None:
        status, output = layers.check()
        assert status == 0, output

    def test_allow_the_house_as_designed(self, layers: Layers) -> None:
        for name, content in ROOMS.items():
            layers.add_module(name, content)
        status, output = layers.check()
        assert status == 0, output

    @pytest.mark.parametrize(("name", "content"), OFFENCES)
    def test_notice_an_import_against_them(self, layers: Layers, name: str, content: str) -> None:
        for room, imports in ROOMS.items():
            layers.add_module(room, imports)
        layers.add_module(name, content + "\n")
        status, output = layers.check()
        assert status == 1, output
        assert name in output
        assert "BROKEN" in output


def find_imports(path: Path) -> set[str]:
    """The packages that a file imports, by the first part of their name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def name_all(requirements: list[str]) -> set[str]:
    return {re.split(r"[=<>~! ;\[]", requirement)[0] for requirement in requirements}


def test_each_imported_package_is_declared() -> None:
    """Another dependency may bring it today, and not tomorrow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = ROOT / "src" / "k8e"
    optional = {"kubernetes": (source / "engine" / "kubernetes", source / "replicas")}  # each is for these only
    extras = {name: name_all(project["optional-dependencies"][name]) for name in optional}
    assert extras.keys() == project["optional-dependencies"].keys()
    known = sys.stdlib_module_names | {"k8e"}
    provided = importlib.metadata.packages_distributions()
    inside = {"k8e_figures.py"}  # runs in a sandbox, where matplotlib is the user's
    standalone = ROOT / "src" / "k8e" / "cli" / "standalone"  # has its libraries in it, and is not in the wheel
    for path in set((ROOT / "src").rglob("*.py")) - set(standalone.rglob("*.py")):
        for package in find_imports(path) - known if path.name not in inside else ():
            providers = {name.lower().replace("_", "-") for name in provided.get(package, [])}
            declared = name_all(project["dependencies"])
            for name, folders in optional.items():
                declared |= extras[name] if any(map(path.is_relative_to, folders)) else set()
            assert providers & declared, f"{package}, which {path.relative_to(ROOT)} imports, is not declared"


class TestLock:
    def test_pins_every_development_tool_by_version_and_hash(self) -> None:
        lock = (ROOT / "requirements.lock").read_text()
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        for requirement in project["dependency-groups"]["dev"]:
            name = re.split(r"[=<>~! ;\[]", requirement)[0]
            assert re.search(rf"^{name}==\S+ .*\\\n    --hash=sha256:", lock, re.MULTILINE), name

    def test_names_no_address(self) -> None:
        """It has to work behind whatever mirror a machine is configured for."""
        assert "://" not in (ROOT / "requirements.lock").read_text()

    def test_the_compiler_of_a_release_is_one_exact_version(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        development = {pin for pin in project["dependency-groups"]["dev"] if pin.startswith("ziglang")}
        assert development == {pin for pin in project["build-system"]["requires"] if pin.startswith("ziglang")}
        assert re.fullmatch(r"ziglang==[\d.]+", *development)


class TestWords:
    SOURCES = sorted(path for path in (ROOT / "src" / "k8e").rglob("*.py") if not path.name.endswith("_pb2.py"))
    NOUNS = frozenset({"ceiling"})  # that end like gerunds

    def test_a_comment_names_its_actor(self) -> None:
        """The account nobody is one."""
        vague = re.compile(r"\b(somebody|nobody|whoever|anybody|everybody|someone|anyone)\b", re.IGNORECASE)
        account = re.compile(r"\"nobody\"|account `?nobody|^nobody:.*", re.MULTILINE)
        for path in self.SOURCES:
            assert not vague.findall(account.sub("", path.read_text())), path

    def test_a_docstring_begins_with_what_the_thing_does(self) -> None:
        for path in self.SOURCES:
            assert not re.findall(r'^ *"""What .*', path.read_text(), re.MULTILINE), path

    def test_a_file_is_named_by_a_noun(self) -> None:
        assert not [path for path in self.SOURCES if path.stem.endswith("ing") and path.stem not in self.NOUNS]


def test_setting_up_again_does_nothing_and_says_nothing() -> None:
    done = subprocess.run([ROOT / "scripts" / "setup"], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_fixture_of_the_whole_session_is_async() -> None:
    """It would keep one event loop, with the threads that it has made, for all files after it: those that enter a
    network namespace would do a part of their work outside of it."""
    found = [
        f"{path.relative_to(ROOT)}: {function}"
        for pattern in ("conftest.py", "test_*.py")
        for path in (ROOT / "tests").rglob(pattern)
        for function in re.findall(r'@pytest\.fixture\(scope="session".*\)\nasync def (\w+)', path.read_text())
    ]
    assert found == []
