"""One entry is put into a configuration and taken out again; everything else is the same to the byte."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k8e.cli.skill import jsontext
from k8e.cli.skill.entry import KEYS, drop_entry, put_entry
from k8e.cli.skill.install import SERVER
from k8e.cli.skill.jsontext import NotJson
from k8e.cli.skill.tomltext import NotToml

JSON = Path("c.json")
TOML = Path("c.toml")
COMMAND = {"command": "k8e", "args": ["sandbox-mcp"]}
URL = {"type": "http", "url": "http://127.0.0.1:8811/mcp"}

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
keys = words | st.sampled_from(["mcpServers", "a", "command"])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=10
)
servers = st.dictionaries(words.filter(lambda name: name != SERVER), values, max_size=3)
documents = st.builds(
    lambda rest, group: {**rest, **({} if group is None else {"mcpServers": group})},
    st.dictionaries(keys.filter(lambda key: key != "mcpServers"), values, max_size=4),
    st.none() | servers,
)
blanks = st.sampled_from(["", " ", "\n", "\n  ", "\t", " // note: {\n", "/* , } */", "\n\n    ", " /* a\n b */ "])


@st.composite
def layouts(draw: st.DrawFn, value: Any) -> str:
    """The document as somebody may have written it."""
    if draw(st.booleans()):
        newline = draw(st.sampled_from(["\n", "\r\n"]))
        indent = draw(st.sampled_from([None, 0, 1, 2, 4, "\t"]))
        return json.dumps(value, indent=indent, ensure_ascii=draw(st.booleans())).replace("\n", newline) + newline

    def write(part: Any) -> str:
        def gap() -> str:
            return draw(blanks)

        if isinstance(part, dict):
            inner = ",".join(f"{gap()}{json.dumps(key)}{gap()}:{gap()}{write(one)}{gap()}" for key, one in part.items())
            return "{" + (inner or gap()) + "}"
        if isinstance(part, list):
            return "[" + (",".join(f"{gap()}{write(one)}{gap()}" for one in part) or gap()) + "]"
        return json.dumps(part)

    return draw(blanks) + write(value) + draw(blanks)


def put(file: Path, text: str, entry: dict[str, Any]) -> str:
    return put_entry(file, text, entry, SERVER)


def is_within(part: str, whole: str) -> bool:
    """Whether all of it is there, in this order."""
    letters = iter(whole)
    return all(letter in letters for letter in part)


@settings(max_examples=300, deadline=None)
@given(st.data(), documents)
def test_json_keeps_every_byte(data: st.DataObject, document: dict[str, Any]) -> None:
    text = data.draw(layouts(document))
    assert jsontext.parse(text).content == document
    installed = put(JSON, text, COMMAND)
    expected = {**document, "mcpServers": {**document.get("mcpServers", {}), SERVER: COMMAND}}
    assert jsontext.parse(installed).content == expected
    # Nothing but the entry and what holds it was put in, in at most two places.
    assert is_within(text, installed)
    start = next((at for at, (old, new) in enumerate(zip(text, installed, strict=False)) if old != new), len(text))
    assert installed[:start] == text[:start]
    assert put(JSON, installed, COMMAND) == installed, "once is enough"
    moved = put(JSON, installed, URL)
    assert jsontext.parse(moved).content["mcpServers"][SERVER] == URL
    assert jsontext.parse(put(JSON, moved, COMMAND)).content == expected
    removed = drop_entry(JSON, installed, SERVER)
    assert jsontext.parse(removed).content == {**document, "mcpServers": document.get("mcpServers", {})}
    if document.get("mcpServers"):
        assert removed == text


@settings(max_examples=300, deadline=None)
@given(st.data(), st.dictionaries(keys, values, max_size=2), st.lists(words.filter(lambda word: word != "ours")))
def test_a_list_keeps_every_byte(data: st.DataObject, rest: dict[str, Any], items: list[str]) -> None:
    path = ("permissions", "allow")
    document = {**rest, "permissions": {"deny": ["x"], "allow": items}}
    text = data.draw(layouts(document))
    longer = jsontext.add_item(text, path, "ours")
    assert jsontext.parse(longer).content == {**rest, "permissions": {"deny": ["x"], "allow": [*items, "ours"]}}
    assert is_within(text, longer)
    assert jsontext.add_item(longer, path, "ours") == longer, "once is enough"
    shorter = jsontext.remove_item(longer, path, "ours")
    assert jsontext.parse(shorter).content == document
    if items:
        assert shorter == text
    for item in set(items):
        less = jsontext.remove_item(text, path, item)
        left = [*items]
        left.remove(item)
        assert jsontext.parse(less).content["permissions"]["allow"] == left
        assert is_within(less, text)
    made = jsontext.add_item(text, ("permissions", "ask"), "ours")
    assert jsontext.parse(made).content["permissions"]["ask"] == ["ours"]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.dictionaries(keys, values, max_size=3))
def test_what_others_put_into_our_entry_stays(data: st.DataObject, extra: dict[str, Any]) -> None:
    for key in KEYS:
        extra.pop(key, None)
    text = data.draw(layouts({"mcpServers": {SERVER: {**extra, "command": "old", "url": "old"}, "other": {}}, "z": 0}))
    changed = jsontext.parse(put(JSON, text, COMMAND)).content
    assert changed == {"mcpServers": {SERVER: {**extra, **COMMAND}, "other": {}}, "z": 0}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "1",
        '"x"',
        "{}}",
        '{"a": 1,}',
        "{'a': 1}",
        '{"a": 01}',
        '{"a": NaN}',
        '{"a" 1}',
        '{"a": 1 "b": 2}',
        '{"a": 1, "a": 2}',
        '{"mcpServers": []}',
        '{"mcpServers": {"k8e-sandbox": 1}}',
        '{"mcpServers": {}, "mcpServers": {}}',
        '{"a": "\n"}',
        '{"a": "\\x"}',
        "/* { }",
        "[" * 100_000,
    ],
)
def test_json_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(NotJson):
        put(JSON, text, COMMAND)


def test_a_mark_at_the_beginning_stays() -> None:
    assert put(JSON, '\ufeff{"a": 1}', COMMAND).startswith('\ufeff{"a": 1, ')


NAMES = st.from_regex(r"[a-z][a-z_-]{0,5}", fullmatch=True)
TOML_LINES = st.sampled_from(
    [
        "# a comment\n",
        "\n",
        "  \t\n",
        "# [mcp_servers.k8e-sandbox]\n",
        'text = """\n[mcp_servers.k8e-sandboxes]\ncommand = "x"\n"""\n',
        "list = [\n  1, # one\n  2,\n]\n",
        "when = 2026-01-01T00:00:00Z\n",
        "big = 1_000\n",
        "quoted = 'C:\\x'\n",
    ]
)


@st.composite
def toml_texts(draw: st.DrawFn) -> str:
    lines, used = [], set()
    for line in draw(st.lists(TOML_LINES, max_size=5)):
        if "=" not in line or line not in used:
            used.add(line)
            lines.append(line)
    for name in draw(st.lists(NAMES, unique=True, max_size=3)):
        lines.append(draw(st.sampled_from(["[t_{}]\n", "[mcp_servers.{}]\n", '[mcp_servers."{}"] # x\n'])).format(name))
        lines.append(draw(st.sampled_from(['command = "y"\n', "", "a.b = 1\n", 'args = ["z"] # w\n\n'])))
    text = "".join(lines)
    if draw(st.booleans()):
        text = text.removesuffix("\n")
    return text.replace("\n", "\r\n") if draw(st.booleans()) and '"""' not in text else text


@settings(max_examples=300, deadline=None)
@given(toml_texts())
def test_toml_keeps_every_byte(text: str) -> None:
    before = tomllib.loads(text)
    installed = put(TOML, text, COMMAND)
    assert installed.startswith(text), "ours is at the end"
    assert tomllib.loads(installed) == {
        **before,
        "mcp_servers": {**before.get("mcp_servers", {}), SERVER: COMMAND},
    }
    assert put(TOML, installed, COMMAND) == installed
    moved = put(TOML, installed, {"url": "http://x/mcp"})
    assert tomllib.loads(moved)["mcp_servers"][SERVER] == {"url": "http://x/mcp"}
    assert put(TOML, moved, COMMAND) == installed
    removed = drop_entry(TOML, installed, SERVER)
    assert tomllib.loads(removed) == before
    assert removed.startswith(text.rstrip("\r\n"))


def test_what_others_put_into_our_table_stays() -> None:
    text = (
        'x = 1\n[mcp_servers."k8e-sandbox"] # mine\nenabled = false # for now\ncommand = "old"\nargs = []\n\n'
        '[mcp_servers.k8e-sandbox.env]\nA = "b"\n[other]\ny = 2\n'
    )
    changed = put(TOML, text, COMMAND)
    assert changed == text.replace(
        'enabled = false # for now\ncommand = "old"\nargs = []\n',
        'command = "k8e"\nargs = ["sandbox-mcp"]\nenabled = false # for now\n',
    )
    assert drop_entry(TOML, changed, SERVER) == "x = 1\n[other]\ny = 2\n"


@pytest.mark.parametrize(
    "text",
    [
        "x =",
        "[a]\n[a]\n",
        "mcp_servers = 1\n",
        'mcp_servers = { other = { command = "x" } }\n',
        "[[mcp_servers]]\n",
        "mcp_servers.k8e-sandbox = 1\n",
        'mcp_servers.k8e-sandbox.command = "old"\n',
        '[mcp_servers]\nk8e-sandbox = { command = "old" }\n',
        '[mcp_servers.k8e-sandbox]\ncommand = """\nold\n"""\n',
    ],
)
def test_toml_that_cannot_be_changed_in_place_is_refused(text: str) -> None:
    with pytest.raises(NotToml):
        put(TOML, text, COMMAND)


WITH_VARIABLES = {**COMMAND, "env": {"K8E_RUN_DIR": "/x", "A": "new"}}


class TestVariables:
    """Those of the entry are added to the ones that its owner has put there."""

    def test_in_json(self) -> None:
        text = '{"mcpServers": {"k8e-sandbox": {"env": {"A": "old" /* mine */, "B": "b"}, "command": "k8e"}}}'
        changed = put(JSON, text, WITH_VARIABLES)
        (entry,) = jsontext.parse(changed).content["mcpServers"].values()
        assert entry["env"] == {"A": "new", "B": "b", "K8E_RUN_DIR": "/x"}
        assert "/* mine */" in changed
        assert put(JSON, changed, WITH_VARIABLES) == changed
        with pytest.raises(NotJson):
            put(JSON, '{"mcpServers": {"k8e-sandbox": {"env": 1}}}', WITH_VARIABLES)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            '[mcp_servers.k8e-sandbox]\nenv = { A = "old", B = "b" }\ncommand = "k8e"\n',
            '[mcp_servers.k8e-sandbox]\ncommand = "x"\n[mcp_servers.k8e-sandbox.env] # mine\nB = "b" # b\nA = "old"\n',
            '[mcp_servers.k8e-sandbox.env]\nB = "b"\n[x]\ny = 1\n',
        ],
    )
    def test_in_toml(self, text: str) -> None:
        others = {"B": "b"} if "B" in text else {}
        changed = put(TOML, text, WITH_VARIABLES)
        table = tomllib.loads(changed)["mcp_servers"][SERVER]
        assert table == {**COMMAND, "env": {**others, "K8E_RUN_DIR": "/x", "A": "new"}}
        assert changed.count("# mine") == text.count("# mine")
        assert changed.count("# b") == text.count("# b")
        assert put(TOML, changed, WITH_VARIABLES) == changed
        assert "k8e-sandbox" not in drop_entry(TOML, changed, SERVER)
