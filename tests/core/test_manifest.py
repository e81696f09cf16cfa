from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.core.checks import MAX_PATH
from k8e.core.errors import Fault, Kind
from k8e.core.model import MAX_MESSAGE, ManifestDir, ManifestEntry, ManifestFile, ManifestRepo
from k8e.core.sandbox.manifest import (
    CLONE_SECONDS,
    KINDS,
    MAX_ENTRIES,
    MAX_TEXT,
    check_entries,
    list_steps,
    parse_manifest,
)
from tests.core.rig import fault

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "manifest.md").read_text()

MANIFEST = """
entries:
  - file:
      path: src/main.py
      content: |
        print("no")
      mode: 0755
  - file: {path: empty}
  - dir: {path: data}
  - gitRepo: {path: app, repo: "https://example.org/app.git", ref: v1.2}
"""


def test_reads_files_directories_and_repositories() -> None:
    assert parse_manifest(MANIFEST) == (
        ManifestFile("src/main.py", b'print("no")\n', 0o755),
        ManifestFile("empty", b"", 0o644),
        ManifestDir("data"),
        ManifestRepo("app", "https://example.org/app.git", "v1.2"),
    )


def test_a_bare_list_and_nothing_at_all_are_manifests() -> None:
    assert parse_manifest("- dir: {path: a}") == (ManifestDir("a"),)
    assert parse_manifest("# nothing\n") == ()


@pytest.mark.parametrize("mode", ["644", "0644", "0o644", '"0644"', "'644'"])
def test_a_mode_is_octal_however_it_is_written(mode: str) -> None:
    (entry,) = parse_manifest(f"- file: {{path: a, mode: {mode}}}")
    assert entry == ManifestFile("a", b"", 0o644)


@pytest.mark.parametrize("content", ["no", "1e3", "0644", "~", "2020-01-01", "null", "1_000", "0x1F", "<<"])
def test_content_is_text_as_it_stands(content: str) -> None:
    (entry,) = parse_manifest(f"- file: {{path: a, content: {content}}}")
    assert isinstance(entry, ManifestFile)
    assert entry.content == content.encode()


@pytest.mark.parametrize(
    ("text", "field", "line"),
    [
        ("entries:\n- file: {path: a, mod: 1}", "manifest.entries[0].file", 2),
        ("- dir: {path: a}\n- folder: {path: a}", "manifest[1]", 2),
        ("- dir: {}", "manifest[0].dir", 1),
        ("- dir: {path: a, path: b}", "manifest[0].dir", 1),
        ("- dir: {path: [a]}", "manifest[0].dir.path", 1),
        ("- dir: a", "manifest[0].dir", 1),
        ("- file: {path: a}\n  dir: {path: b}", "manifest[0]", 1),
        ("- file: {path: a, mode: rwx}", "manifest[0].file.mode", 1),
        ("- file: {path: a, mode: 99}", "manifest[0].file.mode", 1),
        ("- file: {path: a, content: !!binary aGk=}", "manifest[0].file.content", 1),
        ("- !!python/object/apply:os.system {}", "manifest[0]", 1),
        ("- &a [*a]", "manifest[0]", 1),
        ("entry: []", "manifest", 1),
        ("entries: []\nother: 1", "manifest", 2),
        ("just text", "manifest", 1),
        ("a: [", "manifest", 1),
        ("- a\n---\n- b", "manifest", 2),
    ],
)
def test_whatever_is_not_understood_is_an_error_with_its_place(text: str, field: str, line: int) -> None:
    with pytest.raises(Fault) as caught:
        parse_manifest(text)
    assert (caught.value.kind, caught.value.field) == (Kind.INVALID, field)
    assert f"line {line}" in caught.value.error


HOSTILE = ["[" * 5000, '- "\\Uffffffff"', "\0", '- file: {path: a, content: "\\ud800"}', "x" * (5 << 20)]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_refused_like_any_other(text: str) -> None:
    with fault(Kind.INVALID, "invalid_argument"):
        parse_manifest(text)


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (ManifestDir(""), "manifest[0].path"),
        (ManifestDir("a\0"), "manifest[0].path"),
        (ManifestFile("a", b"", 0o10000), "manifest[0].mode"),
        (ManifestRepo("a", "--upload-pack=touch /tmp/x"), "manifest[0].repo"),
        (ManifestRepo("a", "-c"), "manifest[0].repo"),
        (ManifestRepo("a", ""), "manifest[0].repo"),
        (ManifestRepo("a", "https://x\n-y"), "manifest[0].repo"),
        (ManifestRepo("a", "https://x", "--all"), "manifest[0].ref"),
        (ManifestRepo("a", "https://x", "+main"), "manifest[0].ref"),
        (ManifestRepo("a", "https://x", "a:b"), "manifest[0].ref"),
        (ManifestRepo("a", "https://x", "a..b"), "manifest[0].ref"),
    ],
)
def test_entries_are_checked_wherever_they_come_from(entry: ManifestEntry, field: str) -> None:
    with fault(Kind.INVALID, "invalid_argument", field):
        check_entries([entry])


PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
FILES = st.builds(
    lambda path, content, mode: ManifestFile(path, content.encode(), mode),
    PATHS,
    st.text(st.characters(codec="utf-8")),
    st.integers(0, 0o7777),
)
ENTRIES = st.one_of(FILES, st.builds(ManifestDir, PATHS))


def spell(entry: ManifestEntry) -> dict[str, object]:
    if isinstance(entry, ManifestFile):
        return {"file": {"path": entry.path, "content": entry.content.decode(), "mode": f"{entry.mode:o}"}}
    return {"dir": {"path": entry.path}}


@given(st.lists(ENTRIES, max_size=5))
def test_what_is_spelled_in_json_is_read_back_exactly(entries: list[ManifestEntry]) -> None:
    assert parse_manifest(json.dumps([spell(entry) for entry in entries])) == tuple(entries)


@given(st.text(st.sampled_from("-: {}[]&*!|>%@`\"'#,?\\\n\t abcfilepathdirmode0123\0\x85\ufeff"), max_size=60))
def test_any_text_is_a_manifest_or_a_fault(text: str) -> None:
    with contextlib.suppress(Fault):  # and nothing else
        parse_manifest(text)


def test_a_repository_is_cloned_by_exact_commands() -> None:
    assert list(list_steps(ManifestRepo("app", "https://x/y"), b"/workspace/app")) == [
        (b"git", b"clone", b"--quiet", b"--depth=1", b"--", b"https://x/y", b"/workspace/app")
    ]
    steps = list(list_steps(ManifestRepo("app", "https://x/y", "main"), b"/workspace/app"))
    assert [step[-1] for step in steps] == [b"/workspace/app", b"main", b"FETCH_HEAD"]


class TestThePage:
    def test_has_every_kind_of_entry_and_every_key(self) -> None:
        rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \|", PAGE, re.MULTILINE)
        assert {(kind, key) for kind, key, _ in rows} == {(kind, key) for kind in KINDS for key in KINDS[kind][1]}
        values = {"path": "a", "repo": "https://example.org/a.git", "mode": "600"}
        for kind in KINDS:
            needed = [key for entry, key, word in rows if (entry, word) == (kind, "yes")]
            parse_manifest(json.dumps([{kind: {key: values[key] for key in needed}}]))
            for left_out in needed:
                some = {key: values[key] for key in needed if key != left_out}
                with fault(Kind.INVALID, "invalid_argument"):
                    parse_manifest(json.dumps([{kind: some}]))

    def test_has_an_example_that_works(self) -> None:
        (example,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        entries = parse_manifest(example)
        assert {type(entry) for entry in entries} == {ManifestFile, ManifestDir, ManifestRepo}

    def test_has_the_limits(self) -> None:
        limits = [int(number) for number in re.findall(r"^\| [a-z ]+ \| (\d+) \|$", PAGE, re.MULTILINE)]
        assert limits == [MAX_TEXT, MAX_ENTRIES, MAX_MESSAGE, MAX_PATH, CLONE_SECONDS]
