"""Where keys stand in a TOML text, compared with what `tomllib` finds."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from k8e.profiles.config.lines import find_lines

TEXT = '''\
# a comment with [brackets] and x = 1
top = "x"
"quoted key" = 'it''s'

[sandbox]   # behind it
name = "a # no comment"
long = """
[not.a.table]
not = "a key"
"""
numbers = [
  1, # one
  2,
  [3, 4],
]
raw = \'\'\'
also = "no key"
\'\'\'
[a.b."c.d"]
x.y.z = { k = 1, "l" = [ { m = 2 } ] }

[[files]]
source = "1"
[files.more]
deep = true

[[files]]
source = "2"
quotes = """two "" and ""\\"" end"""""
last = 1979-05-27T07:32:00Z
'''.replace("'it''s'", "'its'")


def test_every_key_has_its_line() -> None:
    lines = find_lines(TEXT)
    found = {path: TEXT.splitlines()[line - 1] for path, line in lines.items()}
    assert found["top",] == 'top = "x"'
    assert found["quoted key",].startswith('"quoted key"')
    assert found["sandbox",].startswith("[sandbox]")
    assert found["sandbox", "numbers"] == "numbers = ["
    assert found["sandbox", "numbers", "1"] == "  2,"
    assert found["sandbox", "raw"] == "raw = '''"
    assert found["a", "b", "c.d", "x", "y", "z", "k"].startswith("x.y.z")
    assert found["files", "0", "more", "deep"] == "deep = true"
    assert lines["files", "1", "source"] > lines["files", "0", "source"]
    assert found["files", "1", "last"].startswith("last")


def list_paths(value: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Of every key."""
    if isinstance(value, dict):
        return {each for key, part in value.items() for each in ((*path, key), *list_paths(part, (*path, key)))}
    if isinstance(value, list):
        return {each for index, part in enumerate(value) for each in list_paths(part, (*path, str(index)))}
    return set()


def test_the_text_has_no_other_keys() -> None:
    assert list_paths(tomllib.loads(TEXT)) <= set(find_lines(TEXT))


KEYS = st.text("abc-_1", min_size=1, max_size=4) | st.text("ab.\" '=#[]é", min_size=1, max_size=5).map(
    lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
)
BLANK = st.sampled_from(["", " ", "  ", "\t"])
STRINGS = st.sampled_from(
    [
        *('"x = 1"', "'[t]'", '"#"', '""', "''", '"\\""'),
        *('"""\nk = 2\n[u]\n"""', "'''\n# no\n'''", '"""a""""', '"""\\"""x"""'),
    ]
)
SCALARS = STRINGS | st.sampled_from(["1", "-1.5e3", "true", "1979-05-27", "0x1f", "inf", "07:32:00"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: "[" + ", ".join(parts) + "]")
        | st.lists(inner, max_size=3).map(lambda parts: "[\n" + "".join(f"  {part}, # c\n" for part in parts) + "]")
        | st.dictionaries(KEYS, inner, max_size=2).map(
            lambda parts: "{ " + ", ".join(f"{key} = {part}" for key, part in parts.items() if "\n" not in part) + " }"
        )
    ),
    max_leaves=5,
)
PAIRS = st.tuples(BLANK, KEYS, BLANK, VALUES, st.sampled_from(["", " # x = [1", "#"])).map(
    lambda parts: f"{parts[0]}{parts[1]}{parts[2]}={parts[2]}{parts[3]}{parts[4]}"
)
HEADERS = st.lists(KEYS, min_size=1, max_size=3).map(lambda keys: f"[{'.'.join(keys)}]") | st.lists(
    KEYS, min_size=1, max_size=2
).map(lambda keys: f"[[ {' . '.join(keys)} ]]  # c")


@given(st.lists(PAIRS | HEADERS | st.sampled_from(["", "# [c]"]), max_size=10), st.sampled_from(["\n", "\r\n"]))
def test_whatever_is_toml_is_found(parts: list[str], newline: str) -> None:
    text = "\n".join(parts).replace("\n", newline) + newline
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    lines = find_lines(text)
    assert list_paths(content) <= set(lines)
    count = text.count("\n")
    for path, line in lines.items():
        assert 1 <= line <= count, path
