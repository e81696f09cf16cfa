"""Scenario 1: `k8e sandbox run "print('hello')" --lang python`, and all that people put between those quotes."""

from __future__ import annotations

import json

import pytest

from tests.scenarios.user import User

# The same text in every language's own printing, from a quoted here-document: nothing may be touched on the way.
AWKWARD = r"""it's "quoted" $HOME `id` $(id) \n \\ \x41 ! * ? ~ {a,b} <x> & | ; # %s %% é 漢字 🙂 -n --lang"""

PROGRAMS = {"bash": "bash", "python": "python3", "node": "node", "ts": "tsx"}


def test_hello(user: User) -> None:
    done = user.types("""k8e sandbox run "print('hello')" --lang python""")
    answer = done.json
    assert (done.code, answer["stdout"], answer["stderr"], answer["exit_code"]) == (0, "hello\n", "", 0)
    assert answer["session_id"].startswith("sess-")
    assert (answer["status"], answer["truncated"], answer["stdout_bytes"]) == ("completed", False, 6)
    assert user.k8e("sandbox", "get", answer["session_id"]).json["runtime"] == user.runtime


def test_the_same_session_is_used_again_and_nothing_has_to_be_managed(user: User) -> None:
    script = """
        k8e sandbox run "open('kept', 'w').write('1')" --lang python | get session_id; echo
        k8e sandbox run 'cat kept' | get stdout; echo
        k8e-sandbox sandbox run 'cat kept' | get session_id; echo
        k8e sandbox status | get session_id; echo
    """
    first, content, third, status = user.lines(script)
    assert content == "1"
    assert first == third == status


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", f"cat <<'END'\n{AWKWARD}\nEND\n"),
        ("python", f"print(r'''{AWKWARD}''')\n"),
        ("node", f"console.log({json.dumps(AWKWARD)})\n"),
        ("ts", f"const text: string = {json.dumps(AWKWARD)}; console.log(text)\n"),
    ],
)
def test_text_arrives_untouched_in_every_language(user: User, language: str, code: str) -> None:
    """By argument, by argument over many lines, by a pipe: the same bytes."""
    if user.run(f"command -v {PROGRAMS[language]}").code:
        pytest.skip(f"no {language} on this machine")
    (user.home / "code").write_text(code)
    script = f"""
        k8e sandbox run "$(cat code)" --lang {language} --raw
        k8e sandbox run --lang {language} --raw < code
        cat code | k8e sandbox run --lang={language} | get stdout
    """
    assert user.lines(script) == [AWKWARD] * 3


def test_many_lines_in_quotes(user: User) -> None:
    script = r"""
k8e sandbox run --raw 'for word in one "two three" '"'"'four'"'"'; do
    echo "<$word>" \
        "$((6 * 7))"
done
# a comment, and no newline at the end
false || echo done'
k8e sandbox run --raw --lang python '
def f(x):
	return "\t" + x + "\\"

print(f("tab"))
if True:
    print("three\nlines")
'
"""
    assert user.lines(script) == ["<one> 42", "<two three> 42", "<four> 42", "done", "\ttab\\", "three", "lines"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("exit 7", 7),
        ("false", 1),
        ("no-such-program", 127),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        ("exit 256", 0),
        ("exit 124", 124),
    ],
)
def test_the_exit_code_is_the_commands(user: User, code: str, expected: int) -> None:
    script = f"k8e sandbox run '{code}'; echo $?; k8e sandbox run '{code}' --raw 2>/dev/null; echo $?"
    answer, plain, raw = user.lines(script)
    assert (int(plain), int(raw), json.loads(answer)["exit_code"]) == (expected, expected, expected)


def test_a_program_that_fails_says_why(user: User) -> None:
    done = user.types("""k8e sandbox run 'import json; json.loads("{")' --lang python""")
    assert done.code == 1
    assert done.json["exit_code"] == 1
    assert "JSONDecodeError" in done.json["stderr"]
    assert done.json["stdout"] == ""


def test_bytes_go_in_and_come_out_as_they_are(user: User) -> None:
    content = bytes(range(256)) * 5000 + b"no newline at the end"
    (user.home / "in").write_bytes(content)
    script = """
        k8e sandbox run cat --stdin --raw < in > out && cmp in out && echo same
        k8e sandbox run 'cat >&2' --stdin --raw < in 2> err && cmp in err && echo same
        head -c 1000 in | k8e sandbox run 'sha256sum' --stdin --raw
        head -c 1000 in | sha256sum
        k8e sandbox run "$(printf 'printf "\\\\000\\\\377\\\\n"')" --raw | od -An -tx1
    """
    same, again, inside, outside, raw = user.lines(script)
    assert (same, again) == ("same", "same")
    assert inside == outside
    assert raw.split() == ["00", "ff", "0a"]


def test_output_that_is_no_text_is_still_one_json_object(user: User) -> None:
    done = user.types(r"k8e sandbox run 'printf \\377\\376ok; printf \\200 >&2'")
    assert done.code == 0
    assert done.json["stdout_bytes"] == 4
    assert done.json["stdout"].endswith("ok")


def test_huge_output_is_whole_with_raw_and_bounded_with_counts_without(user: User) -> None:
    code = "head -c 20000000 /dev/zero | tr '\\\\0' x; echo end; head -c 3000000 /dev/zero >&2"
    script = f"""
        k8e sandbox run "{code}" --raw 2>errors | wc -c
        wc -c < errors
        k8e sandbox run "{code}" > answer; echo $?
    """
    assert user.lines(script) == ["20000004", "3000000", "0"]
    answer = json.loads((user.home / "answer").read_text())
    assert (answer["stdout_bytes"], answer["stderr_bytes"], answer["truncated"]) == (20_000_004, 3_000_000, True)
    assert len(answer["stdout"]) <= 1 << 20
    assert answer["stdout"].endswith("xend\n")


def test_environment_and_workdir(user: User) -> None:
    script = """
        k8e sandbox run 'echo "$A|$B"; pwd; echo $HOME; id -un' --raw --env A='x y' --env 'B=$=" ' --workdir /tmp
    """
    assert user.lines(script) == ['x y|$=" ', "/tmp", "/home/user", "user"]


def test_the_tools_that_people_expect_are_there(user: User) -> None:
    for tool in ("python3 --version", "pip --version", "git --version", "bash --version"):
        assert user.run(tool).json["exit_code"] == 0, tool


def test_nothing_of_the_machine_is_to_be_seen(user: User) -> None:
    (user.home / "secret").write_text("hidden")
    script = f"""
        k8e sandbox run 'cat {user.home}/secret; ls -A /root; ls {user.folder}; cat /etc/shadow; true' | get stdout
    """
    assert user.lines(script) == []
