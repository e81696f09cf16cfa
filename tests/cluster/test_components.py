"""The pins of components say exactly what is built, and what was built is used once and whole."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from k8e.cluster import build
from k8e.cluster.build import build_components, find_components
from k8e.cluster.components import COMPONENTS, HELM, KWOK, Component, Patch
from k8e.cluster.errors import BuildFailed

# Stands in for Go, which would need a network: knows the verbs that a build uses, and counts.
GO = """\
#!/usr/bin/env python3
import json, os, pathlib, sys
state = pathlib.Path(os.environ["GO_STATE"])
with open(state / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:3]) + "\\n")
if sys.argv[1:3] == ["mod", "download"]:
    print(json.dumps({"Dir": str(state / "source")}))
elif sys.argv[1] == "build":
    assert os.environ["GOFLAGS"].startswith("-mod=readonly")
    if (state / "broken").exists():
        sys.exit("main.go:1: expected 'package'")
    folder = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
    patched = pathlib.Path("patched/main.go")
    content = patched.read_text() if patched.exists() else "plain"
    for package in sys.argv[sys.argv.index("-ldflags") + 2 :]:
        (folder / package.removesuffix("/v3").rpartition("/")[2]).write_text(content)
"""


class Workshop:
    """A cache, a stand-in for Go, and a module with one file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.state = folder / "cache", folder / "state"
        (self.state / "source").mkdir(parents=True)
        (self.state / "source" / "main.go").write_text("package before")
        (self.state / "source" / "main.go").chmod(0o444)
        go = folder / "bin" / "go"
        go.parent.mkdir()
        go.write_text(GO)
        go.chmod(0o755)
        monkeypatch.setenv("PATH", f"{go.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("GO_STATE", str(self.state))
        self.said: list[str] = []

    def build(self) -> build.Components:
        return build_components(self.cache, self.said.append)

    def count_builds(self) -> int:
        return sum(line.startswith("build") for line in (self.state / "calls").read_text().splitlines())


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Component:
    """The only component: etcd, with a patch and a file."""
    patch = Patch(file="main.go", old="before", new="after")
    component = replace(next(each for each in COMPONENTS if each.name == "etcd"), patch=patch, files=("main.go",))
    monkeypatch.setattr(build, "COMPONENTS", (component,))
    return component


class TestPins:
    @pytest.mark.parametrize("component", [*COMPONENTS, HELM, KWOK], ids=lambda each: each.name)
    def test_name_one_version_and_the_content_of_all_modules(self, component: Component) -> None:
        assert re.fullmatch(r"v\d+\.\d+\.\d+(-\d{14}-[0-9a-f]{12})?", component.version)
        sums = (component.folder / "go.sum").read_text()
        assert f"{component.module} {component.version} h1:" in sums
        assert all(re.fullmatch(r"\S+ v\S+ h1:\S{44}", line) for line in sums.splitlines())

    def test_of_gvisor_are_the_same_everywhere(self) -> None:
        runsc, shim = (each.version for each in COMPONENTS if each.module == "gvisor.dev/gvisor")
        assert runsc == shim

    def test_programs_have_different_names(self) -> None:
        names = [name for component in COMPONENTS for name in component.packages]
        assert len(set(names)) == len(names)

    def test_another_pin_is_another_build(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        component = COMPONENTS[0]
        before = component.fingerprint
        assert replace(component, tags=("other",)).fingerprint != before
        monkeypatch.setattr("k8e.cluster.components.PINS", tmp_path)
        (tmp_path / component.name).mkdir()
        (tmp_path / component.name / "go.mod").write_text("module other")
        assert component.fingerprint != before


class TestBuild:
    def test_happens_once(self, workshop: Workshop) -> None:
        for name in (name for each in COMPONENTS for name in each.files):
            (workshop.state / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (workshop.state / "source" / name).touch()
        for patch in (each.patch for each in COMPONENTS if each.patch is not None):
            (workshop.state / "source" / patch.file).parent.mkdir(parents=True, exist_ok=True)
            (workshop.state / "source" / patch.file).write_text(patch.old)
        assert find_components(workshop.cache) is None
        components = workshop.build()
        assert workshop.count_builds() == len(COMPONENTS)
        assert all(components.program(name).is_file() for each in COMPONENTS for name in each.packages)
        assert workshop.build().folders == components.folders
        assert workshop.count_builds() == len(COMPONENTS)

    def test_goes_on_after_it_was_cut_off(self, workshop: Workshop, small: Component) -> None:
        workshop.cache.mkdir()
        (workshop.cache / ".partial-killed").mkdir()
        (workshop.cache / ".partial-killed" / "kubelet").write_text("a half")
        components = workshop.build()
        assert sorted(path.name for path in workshop.cache.iterdir()) == [f"etcd-{small.fingerprint}", "lock"]
        assert components.program("etcd").is_file()

    def test_applies_a_patch_to_a_copy_and_keeps_files(self, workshop: Workshop, small: Component) -> None:
        components = workshop.build()
        assert components.program("etcd").read_text() == "package after"
        source = workshop.state / "source" / "main.go"
        assert source.read_text() == "package before"
        assert stat.S_IMODE(source.stat().st_mode) == 0o444
        assert components.file("etcd", "main.go").read_text() == "package before"

    def test_refuses_a_module_that_a_patch_does_not_fit(self, workshop: Workshop, small: Component) -> None:
        (workshop.state / "source" / "main.go").chmod(0o644)
        (workshop.state / "source" / "main.go").write_text("package other")
        with pytest.raises(BuildFailed, match="is not the one that the patch was made for"):
            workshop.build()

    def test_that_fails_is_explained_and_leaves_nothing(self, workshop: Workshop, small: Component) -> None:
        (workshop.state / "broken").touch()
        with pytest.raises(BuildFailed) as caught:
            workshop.build()
        assert caught.value.code == "component_not_built"
        assert "expected 'package'" in caught.value.detail
        assert [path.name for path in workshop.cache.iterdir()] == ["lock"]
        (workshop.state / "broken").unlink()
        assert workshop.build().program("etcd").is_file()

    def test_without_go_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("k8e.cluster.build.shutil.which", lambda name: None)
        with pytest.raises(BuildFailed) as caught:
            build_components(tmp_path, print)
        assert caught.value.code == "go_missing"
