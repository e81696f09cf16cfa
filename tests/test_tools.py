"""The tools layer, and what a sandbox's user can do with it: pip, npm, tsx and the rest of the toolchain."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from k8e.engine import Runtime
from k8e.engine.local import LocalEngine
from k8e.engine.local.roots import host_image
from k8e.engine.local.runtime.bundle import HostPath
from k8e.engine.local.system.tool import find_tool
from k8e.engine.local.toolchain import tools_layer
from tests.engine.rig import Rig, Room, find_report, open_engine, place_for_engine
from tests.runtimes import do_without

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the local engine needs root")
needs_node = pytest.mark.skipif(find_tool("npm") is None, reason="node and npm are not installed for everybody")
PACKAGED_PIPS = [str(path) for path in Path("/usr").glob("l*/**/dist-packages/pip") if path.is_dir()]
MULTI_LINE = r"""
interface Point { x: number; y: number }
const points: Point[] = [{ x: 1, y: 2 }, { x: 3, y: 4 }]
for (const { x, y } of points) {
    console.log(`${x}\t"${y}" $HOME \\`)
}
"""


def build_wheel(name: str, version: str, code: str) -> bytes:
    """A wheel, as small as they come, with a command of the same name."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: k8e\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text.encode())}\n")
    files[f"{info}/RECORD"] = "".join(record) + f"{info}/RECORD,,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def layer() -> Iterator[tools_layer.Layer]:
    """A real one. Its folder can be walked through by the root of a user namespace, who is nobody out here."""
    with tempfile.TemporaryDirectory(prefix="k8e-tools-", dir="/tmp") as folder:
        os.chmod(folder, 0o711)
        layer = tools_layer.install(Path(folder, "tools"))
        if layer.missing:
            pytest.skip("; ".join(layer.missing))
        yield layer


@contextlib.asynccontextmanager
async def open_tools_rig(runtime: Runtime, layer: tools_layer.Layer) -> AsyncIterator[Rig]:
    with place_for_engine() as (state, run):
        async with open_engine(state, run) as engine:
            engine._tools = layer.path.with_name("tools")
            rig = Rig(runtime, engine, await find_report(engine, runtime))
            if not rig.report.available:
                do_without(runtime.value, rig.report.reason)
            yield rig


@needs_root
@needs_node
@pytest.mark.parametrize("runtime", [Runtime.GVISOR, Runtime.NATIVE], scope="module", ids=lambda runtime: runtime.value)
class TestInSandbox:
    @pytest.fixture(scope="class")
    async def room(self, runtime: Runtime, layer: tools_layer.Layer) -> AsyncIterator[Room]:
        async with open_tools_rig(runtime, layer) as rig, rig.room() as room:
            yield room

    @pytest.mark.parametrize("words", [("pip",), ("pip3",), ("python3", "-m", "pip"), ("python", "-m", "pip")])
    async def test_pip_is_the_layers(self, room: Room, layer: tools_layer.Layer, words: tuple[str, ...]) -> None:
        told = await room.output(*words, "--version")
        assert told.startswith(f"pip {layer.pip} from /opt/k8e/python/pip ")

    async def test_pip_installs_into_the_sessions_own_environment(self, room: Room) -> None:
        code = "def main() -> None:\n    print('hello from a wheel')\n"
        wheel = b"/workspace/wheels/greeting-1.0-py3-none-any.whl"
        await room.link.mkdir(b"/workspace/wheels", identity=room.place.user)
        await room.link.write_file(wheel, build_wheel("greeting", "1.0", code), identity=room.place.user)
        installed = await room.run("pip", "install", "--no-index", "--find-links", "wheels", "greeting")
        assert installed.outcome.exit_code == 0, installed
        assert installed.stderr == b""
        where = await room.output("python3", "-c", "import greeting; greeting.main(); print(greeting.__file__)")
        assert where.splitlines()[0] == "hello from a wheel"
        assert where.splitlines()[1].startswith("/home/user/.venv/lib/")
        assert await room.output("greeting") == "hello from a wheel\n"
        await room.output("pip", "uninstall", "-y", "greeting")
        assert (await room.run("python3", "-c", "import greeting")).outcome.exit_code == 1

    async def test_a_newer_pip_of_the_sessions_own_wins(self, room: Room) -> None:
        """As after `pip install --upgrade pip`."""
        probe = "import pip; print(pip.__file__)"
        site = (await room.output("python3", "-c", "import site; print(site.getsitepackages()[0])")).strip()
        await room.output("mkdir", f"{site}/pip")
        await room.output("touch", f"{site}/pip/__init__.py")
        assert await room.output("python3", "-c", probe) == f"{site}/pip/__init__.py\n"
        await room.output("rm", "-r", f"{site}/pip")
        assert await room.output("python3", "-c", probe) == "/opt/k8e/python/pip/__init__.py\n"

    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            ("const x: number = 1; console.log(x)", "1\n"),
            (MULTI_LINE, '1\t"2" $HOME \\\n3\t"4" $HOME \\\n'),
        ],
        ids=["one-line", "many-lines"],
    )
    async def test_tsx_runs_typescript(self, room: Room, code: str, expected: str) -> None:
        done = await room.run("tsx", "-e", code)
        assert (done.outcome.exit_code, done.stdout.decode(), done.stderr) == (0, expected, b"")

    async def test_tsx_hands_on_the_exit_code(self, room: Room) -> None:
        assert (await room.run("tsx", "-e", "process.exit(7 as number)")).outcome.exit_code == 7

    async def test_npm_installs_a_package_for_the_project_and_for_the_user(self, room: Room) -> None:
        script = """
            mkdir -p hello && cd hello
            echo '{"name": "hello", "version": "1.0.0", "main": "hello.js", "bin": "hello.js"}' > package.json
            printf '#!/usr/bin/env node\\nconsole.log("hello from a package")\\n' > hello.js
            mkdir ../project && cd ../project && echo '{"private": true}' > package.json
            npm install --no-audit --no-fund ../hello >&2 && npx hello && node -e 'require("hello")'
            npm install --global --no-audit --no-fund ../hello >&2 && cd / && hello
        """
        assert await room.output("bash", "-ec", script) == "hello from a package\n" * 3

    async def test_git_keeps_a_history(self, room: Room) -> None:
        script = """
            git init -q repository && cd repository && echo text > file && git add file
            git -c user.name=user -c user.email=user@sandbox commit -q -m message && git log --format=%s
        """
        assert await room.output("bash", "-ec", script) == "message\n"

    async def test_node_and_bash_compute(self, room: Room) -> None:
        assert await room.output("node", "-e", "console.log([1, 2].map(n => n * 2).join())") == "2,4\n"
        assert await room.output("bash", "-c", 'for i in {1..3}; do printf "%s " "$((i * i))"; done') == "1 4 9 "

    async def test_nobody_in_there_can_change_the_layer(self, room: Room) -> None:
        for path in ("/opt/k8e/new", "/opt/k8e/bin/tsx", "/opt/k8e/python/pip/__init__.py"):
            done = await room.as_agent("sh", "-c", 'echo bad >> "$0"', path)
            assert done.outcome.exit_code != 0
            # The second where the file's owner is nobody in the sandbox.
            assert done.stderr.strip().endswith((b"Read-only file system", b"Permission denied"))

    async def test_pip_works_where_the_machines_python_has_none(
        self, runtime: Runtime, layer: tools_layer.Layer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a Debian without python3-pip: what is there is covered by an empty folder."""
        usual = host_image.host_paths
        with tempfile.TemporaryDirectory(prefix="k8e-empty-", dir="/tmp") as empty:
            os.chmod(empty, 0o755)
            overlays = [HostPath(Path(empty), path) for path in PACKAGED_PIPS]
            monkeypatch.setattr(host_image, "host_paths", lambda tools: [*usual(tools), *overlays])
            async with open_tools_rig(runtime, layer) as rig, rig.room() as room:
                bare = await room.run("/usr/bin/python3", "-m", "pip", "--version")
                assert bare.outcome.exit_code == 1, "the machine's own pip is still there"
                assert (await room.output("python3", "-m", "pip", "--version")).startswith(f"pip {layer.pip} ")
                wheel = build_wheel("other", "2.0", "answer = 42\n")
                await room.link.write_file(b"/workspace/other-2.0-py3-none-any.whl", wheel, identity=room.place.user)
                await room.output("pip", "install", "--no-index", "./other-2.0-py3-none-any.whl")
                assert await room.output("python3", "-c", "import other; print(other.answer)") == "42\n"


class Words(list[str]):
    """What was said."""

    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def said() -> Words:
    return Words()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tools"


@pytest.fixture
def without_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has no Node; also much quicker."""
    monkeypatch.setattr(tools_layer, "find_tool", lambda name: None)


@pytest.fixture
def without_anything(without_node: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither: for what has nothing to do with the content."""
    monkeypatch.setattr(tools_layer, "find_pip_wheels", list)


@needs_root
class TestMaking:
    @needs_node
    def test_makes_what_the_lock_says(self, layer: tools_layer.Layer) -> None:
        package = json.loads(tools_layer._DATA.joinpath("package.json").read_text())
        assert layer.tsx == package["dependencies"]["tsx"]
        assert tools_layer.read_layer(layer.path.with_name("tools")) == layer

    @needs_node
    def test_does_nothing_when_it_is_there(self, layer: tools_layer.Layer, said: Words) -> None:
        assert tools_layer.install(layer.path.with_name("tools"), said) == layer
        assert said == []

    @pytest.mark.usefixtures("without_node")
    def test_a_machine_without_node_is_told_and_gets_the_rest(self, target: Path, said: Words) -> None:
        layer = tools_layer.install(target, said)
        assert (layer.tsx, layer.pip is None) == (None, False)
        assert said[-1].startswith("left out tsx: node and npm are not installed")
        said.clear()
        assert tools_layer.install(target, said) == layer
        assert said == []

    @needs_node
    def test_what_could_not_be_had_is_tried_again_only_on_request(
        self, target: Path, said: Words, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as offline:
            offline.setattr(tools_layer, "_add_tsx", self.fail)
            offline.setattr(tools_layer, "_add_pip", lambda *arguments: "1.0")
            first = tools_layer.install(target, said)
        assert said[-1] == "left out tsx: npm: no way to the registry"
        assert tools_layer.install(target, said) == first
        again = tools_layer.install(target, said, retry=True)
        assert (again.missing, again.tsx is None) == ((), False)
        assert again.path != first.path

    @staticmethod
    def fail(folder: Path, ingredients: tools_layer.Ingredients, say: tools_layer.Say) -> str:
        raise tools_layer.ToolsFailed("npm: no way to the registry")

    @pytest.mark.usefixtures("without_node")
    def test_the_newest_pip_that_works_is_taken(
        self, target: Path, said: Words, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = target.parent.parent / "pip-99.1-py3-none-any.whl"
        with zipfile.ZipFile(broken, "w") as archive:
            archive.writestr("pip/__main__.py", "import nothing_of_the_kind\n")
        real = tools_layer.find_pip_wheels()
        monkeypatch.setattr(tools_layer, "find_pip_wheels", lambda: [broken, *real])
        layer = tools_layer.install(target, said)
        assert said[:2] == ["unpacking pip-99.1-py3-none-any.whl", f"unpacking {real[0].name}"]
        assert layer.pip == ".".join(map(str, tools_layer._wheel_version(real[0])))
        assert not (layer.path / "python" / "pip" / "nothing_of_the_kind").exists()

    @pytest.mark.usefixtures("without_anything")
    def test_without_any_pip_it_says_what_to_install(self, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert tools_layer.main([str(target)]) == 1
        assert "apt-get install python3-venv" in capsys.readouterr().err

    @pytest.mark.usefixtures("without_anything")
    def test_is_replaced_as_a_whole_and_the_one_before_stays_for_who_uses_it(
        self, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layers = [tools_layer.install(target)]
        for number in (2, 3):
            monkeypatch.setattr(tools_layer, "_FORMAT", number)
            layers.append(tools_layer.install(target))
        assert target.resolve() == layers[2].path
        assert [layer.path.exists() for layer in layers] == [False, True, True]
        assert {path.name for path in target.parent.iterdir()} == {
            *(".tools.lock", "tools", layers[1].path.name, layers[2].path.name)
        }

    @pytest.mark.usefixtures("without_anything")
    def test_leaves_somebodys_own_folder_alone(self, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target.mkdir(parents=True)
        (target / "mine").touch()
        assert tools_layer.main([str(target)]) == 1
        assert "is in the way" in capsys.readouterr().err
        assert [path.name for path in target.iterdir()] == ["mine"]

    @pytest.mark.usefixtures("without_node")
    def test_everybody_can_read_it_whatever_the_umask(self, target: Path) -> None:
        before = os.umask(0o077)
        try:
            layer = tools_layer.install(target)
        finally:
            os.umask(before)
        for parent, directories, files in os.walk(layer.path):
            assert all(os.stat(os.path.join(parent, name)).st_mode & 0o005 == 0o005 for name in directories)
            assert all(os.stat(os.path.join(parent, name)).st_mode & 0o004 for name in files)

    @needs_node
    def test_pip_is_compiled_for_the_sandboxs_python(self, layer: tools_layer.Layer) -> None:
        sources = list((layer.path / "python" / "pip").rglob("*.py"))
        compiled = list((layer.path / "python" / "pip").rglob("*.pyc"))
        assert len(compiled) == len(sources) > 100

    @pytest.mark.usefixtures("without_anything")
    def test_the_sandbox_starts_with_the_layer_of_the_day(self, target: Path) -> None:
        layer = tools_layer.install(target)
        assert host_image.host_paths(target)[-1] == HostPath(layer.path, "/opt/k8e")

    def test_an_engine_without_a_layer_has_no_overlay_for_it(self, target: Path) -> None:
        assert all(overlay.target != "/opt/k8e" for overlay in host_image.host_paths(target))


class TestLock:
    lock = json.loads(tools_layer._DATA.joinpath("package-lock.json").read_text())

    def test_fixes_version_and_content_of_everything(self) -> None:
        packages = {name: package for name, package in self.lock["packages"].items() if name}
        assert len(packages) > 2
        for name, package in packages.items():
            assert package["integrity"].startswith("sha512-"), name
            assert package["version"], name

    def test_names_no_address(self) -> None:
        """It has to work behind whatever mirror a machine is configured for."""
        text = json.dumps(self.lock)
        assert "://" not in text
        assert "resolved" not in text

    def test_asks_for_exact_versions(self) -> None:
        package = json.loads(tools_layer._DATA.joinpath("package.json").read_text())
        assert package["dependencies"] == self.lock["packages"][""]["dependencies"]
        for version in package["dependencies"].values():
            assert version.replace(".", "").isdigit()


def test_the_default_place_is_where_the_engine_looks() -> None:
    engine = LocalEngine(Path("/tmp/state"), Path("/tmp/run"))
    assert engine._tools == tools_layer.TARGET
