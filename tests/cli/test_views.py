"""What a person sees at a terminal, and that programs see JSON as ever."""

from __future__ import annotations

import json
import os
import re
import subprocess
import termios
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.cli.view.shapes import TABLES, draw
from k8e.cli.view.table import draw_table, measure_width, show_age, show_size, show_span
from tests.cli.machine import DEADLINE, K8E, Machine

COLOUR = re.compile(r"\033\[[0-9]+m")


def type_at_terminal(machine: Machine, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit code, and what the screen shows of standard output and error."""
    screen, device = os.openpty()
    with subprocess.Popen(
        [K8E, *words], stdin=device, stdout=device, stderr=device, env={**machine.env, **(env or {})}, cwd=machine.home
    ) as process:
        os.close(device)
        pieces: list[bytes] = []

        def watch() -> None:
            try:
                while piece := os.read(screen, 65536):
                    pieces.append(piece)
            except OSError:
                pass  # the command has closed it

        reader = threading.Thread(target=watch)
        reader.start()
        code = process.wait(DEADLINE)
        reader.join()
    os.close(screen)
    return code, b"".join(pieces).decode().replace("\r\n", "\n")


@pytest.fixture
def session(machine: Machine) -> str:
    created = machine.k8e("sandbox", "create").json
    assert "session_id" in created, created
    return str(created["session_id"])


def test_a_list_of_sessions_is_a_table(machine: Machine, session: str) -> None:
    code, text = type_at_terminal(machine, "sandbox", "sessions", env={"NO_COLOR": "1", "TERM": "xterm"})
    head, *rows = text.splitlines()
    assert code == 0
    assert head.split()[:4] == ["SESSION", "PHASE", "RUNTIME", "IMAGE"]
    (row,) = [row for row in rows if row.startswith(session)]
    assert "active" in row
    assert "MiB" in row or "GiB" in row
    assert "ago" in row
    assert "\033" not in text


def test_colours_are_for_terminals_that_have_them(machine: Machine, session: str) -> None:
    _, plain = type_at_terminal(machine, "sandbox", "sessions", env={"TERM": "dumb"})
    _, coloured = type_at_terminal(machine, "sandbox", "sessions", env={"TERM": "xterm", "NO_COLOR": ""})
    assert "\033" not in plain
    assert COLOUR.search(coloured)


def test_json_can_be_had_at_a_terminal(machine: Machine, session: str) -> None:
    for words in (["sandbox", "get", session, "--json"], ["sandbox", "run", "--json", "--session-id", session, "true"]):
        code, text = type_at_terminal(machine, *words)
        assert code == 0
        assert json.loads(text)["session_id"] == session


def test_in_a_pipe_everything_is_json(machine: Machine, session: str) -> None:
    assert machine.k8e("sandbox", "sessions").json["sessions"]
    assert machine.k8e("sandbox", "get", session).json == machine.k8e("sandbox", "get", session, "--json").json
    assert machine.k8e("sandbox", "get", "missing").json["code"] == "session_not_found"


def test_a_run_at_a_terminal_shows_its_output(machine: Machine, session: str) -> None:
    code, text = type_at_terminal(machine, "sandbox", "run", "--session-id", session, "echo out; echo err >&2; exit 7")
    assert code == 7
    assert sorted(text.split()) == ["err", "out"]


def test_an_error_at_a_terminal_is_text_with_its_code_and_hint(machine: Machine) -> None:
    code, text = type_at_terminal(machine, "sandbox", "get", "missing", env={"NO_COLOR": "1"})
    assert code == 1
    assert text.startswith("k8e: ")
    assert "[session_not_found]" in text
    assert "  hint: " in text


def test_files_of_a_session_cannot_act_on_the_terminal(machine: Machine, session: str) -> None:
    machine.run("--session-id", session, r"printf 'a\033]0;owned\007b\n\tc' > evil; touch $'na\033[31mme'")
    _, listed = type_at_terminal(machine, "sandbox", "list", session)
    _, content = type_at_terminal(machine, "sandbox", "read", session, "evil")
    for text in (COLOUR.sub("", listed), content):
        assert "\033" not in text
        assert "\007" not in text
    assert "a\\x1b]0;owned\\x07b" in content


def test_k8e_alone_prints_help(machine: Machine) -> None:
    done = machine.k8e()
    assert done.code == 0
    assert done.stdout.startswith(b"usage: k8e")
    assert b"sandbox" in done.stdout


def test_top_shows_what_sessions_take(machine: Machine, session: str) -> None:
    """In a pipe once; at a terminal until it is ended."""
    seen = machine.k8e("top").json
    (mine,) = [each for each in seen["sessions"] if each["session_id"] == session]
    assert mine["load"]["memory"] > 0
    assert {"cpu_seconds", "commands", "denied"} <= set(mine["load"])
    assert len(seen["machine_load"]) == 3
    screen, device = os.openpty()
    termios.tcsetwinsize(device, (500, 200))  # other tests of this daemon have sessions, too
    with subprocess.Popen(
        [K8E, "top", "--every", "0.1"], stdin=device, stdout=device, stderr=device, env=machine.env, cwd=machine.home
    ) as process:
        os.close(device)
        text = b""
        while text.count(session.encode()) < 3:  # it looks again and again
            text += os.read(screen, 65536)
        os.write(screen, b"q")
        try:
            while piece := os.read(screen, 65536):
                text += piece
        except OSError:
            pass  # the command has closed it
        assert process.wait(DEADLINE) == 0
    os.close(screen)
    assert b"sessions" in text
    assert b"load" in text
    assert text.endswith(b"\033[?25h\033[?1049l"), "the terminal is as it was"


def test_every_list_has_its_columns() -> None:
    """An entry with nothing in it but what every answer has is drawn."""
    limits = {"limits": {"cpus": 1.0, "memory": 1 << 30}}
    moments = dict.fromkeys(("created", "last_used", "modified", "asked_at", "expires_at", "added", "started"), 1.0)
    amounts = dict.fromkeys(("size", "stdout_bytes", "stderr_bytes", "duration_ms"), 1536)
    entry = {**limits, **moments, **amounts, "type": "file", "digest": "sha256:" + "a" * 64}
    for noun, columns in TABLES.items():
        head, row = draw({noun: [entry]}).strip().splitlines()[-2:]
        assert len(re.split(r"\s{2,}", head.strip())) == len(columns), noun
        assert row
    assert draw({"sessions": []}, "sessions") == "no sessions\n"


@given(st.lists(st.lists(st.text(max_size=12), min_size=2, max_size=2), max_size=5))
def test_columns_stand_below_each_other(rows: list[list[str]]) -> None:
    text = draw_table(("ONE", "TWO"), rows, {}, wanted=False)
    lines = text.split("\n")[:-1]
    assert len(lines) == len(rows) + 1
    column = measure_width(lines[0][: lines[0].index("TWO")])
    assert all(letter.isprintable() for line in lines for letter in line)
    assert all(measure_width(line) <= column or line[:column].strip() or line for line in lines)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (5 << 30, "5 GiB")]
)
def test_sizes(number: int, text: str) -> None:
    assert show_size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "250ms"), (5, "5s"), (90, "1m30s"), (3600, "1h"), (90_061, "1d1h"), (86_400, "1d")]
)
def test_spans(seconds: float, text: str) -> None:
    assert show_span(seconds) == text


def test_ages() -> None:
    assert show_age(None) == "never"
    assert show_age(time.time() - 120).startswith("2m")
