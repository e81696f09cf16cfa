"""The three ways to have a session: auto, by tenant, by hand; and two shells at the same moment."""

from __future__ import annotations

import json

from tests.scenarios.user import User


def test_auto(user: User) -> None:
    script = """
        k8e sandbox run 'echo auto > file' > /dev/null
        cat ~/.k8e/sandbox/default/state.json | get session_id; echo
        k8e sandbox run 'cat file' | get stdout
        bash -c 'k8e sandbox run "cat file" --raw'
        ls -A ~/.k8e/sandbox
    """
    session, *rest = user.lines(script)
    assert session.startswith("sess-")
    assert rest == ["auto", "auto", "default"]


def test_tenants(user: User) -> None:
    script = """
        k8e sandbox run 'echo mine > file' --tenant my-project > /dev/null
        k8e sandbox run 'cat file' --tenant my-project --raw
        k8e sandbox run 'cat file' --tenant other --raw 2>/dev/null; echo $?
        ls ~/.k8e/sandbox
        cat ~/.k8e/sandbox/my-project/state.json | get session_id > first
        k8e sandbox destroy $(cat first) | get ok; echo
        k8e sandbox run 'cat file 2>/dev/null || echo gone' --tenant my-project --raw
        [ "$(cat ~/.k8e/sandbox/my-project/state.json | get session_id)" != "$(cat first)" ] && echo another
    """
    assert user.lines(script) == ["mine", "1", "my-project", "other", "True", "gone", "another"]


def test_by_hand(user: User) -> None:
    script = f"""
        SID=$(k8e sandbox create --runtime {user.runtime} --session-id by-hand --memory 256m --cpus 1 --ttl 10m \
            --env GREETING='hello $USER' | get session_id)
        k8e sandbox create --session-id by-hand | get code; echo
        k8e sandbox run 'echo "$GREETING"' --session-id $SID --raw
        k8e sandbox get $SID | get runtime; echo
        k8e sandbox get $SID | grep -c 'hello'
        k8e sandbox sessions | grep -c by-hand
        k8e sandbox ps $SID
        k8e sandbox log $SID | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["runs"]))'
        k8e sandbox destroy $SID | get ok; echo
        k8e sandbox run true --session-id $SID | get code; echo
        ls -A ~
    """
    lines = user.lines(script)
    assert lines == [
        *("session_exists", "hello $USER", user.runtime, "0", "1", '{"processes": []}', "1", "True"),
        "session_not_found",
    ]


def test_a_manifest_is_all_there_or_nothing_is(user: User) -> None:
    script = """
        cat > manifest.yaml <<'END'
- dir: {path: data}
- file: {path: data/config.json, content: '{"a": "it''s $HOME"}', mode: 0600}
- file:
    path: run.sh
    mode: 0755
    content: |
      #!/bin/sh
      stat -c %a data/config.json
      cat data/config.json
END
        SID=$(k8e sandbox create --manifest manifest.yaml | get session_id)
        k8e sandbox run ./run.sh --session-id $SID --raw; echo
        printf -- '- file: {path: ok, content: x}\\n- file: {path: /usr/no, content: x}\\n' > bad.yaml
        k8e sandbox create --session-id never --manifest bad.yaml > refused; echo $?
        k8e sandbox get never | get code; echo
    """
    mode, content, code, missing = user.lines(script)
    assert (mode, content, code, missing) == ("600", '{"a": "it\'s $HOME"}', "1", "session_not_found")
    refused = json.loads((user.home / "refused").read_text())
    assert "/usr/no" in json.dumps(refused)


def test_two_shells_at_the_same_moment_share_one_session(user: User) -> None:
    script = """
        for number in 1 2 3 4; do
            k8e sandbox run "echo $number >> together; echo $number" > out.$number &
        done
        wait
        cat out.* | python3 -c '
import json, sys
answers = [json.loads(line) for line in sys.stdin]
print(len({answer["session_id"] for answer in answers}), sorted(answer["stdout"].strip() for answer in answers))'
        k8e sandbox run 'sort together | tr -d "\\n"' --raw; echo
    """
    assert user.lines(script) == ["1 ['1', '2', '3', '4']", "1234"]


def test_a_runtime_that_does_not_exist_yet_says_so(user: User) -> None:
    for name in ("kata", "firecracker"):
        done = user.types(f"k8e sandbox create --runtime {name}")
        assert (done.code, done.json["code"]) == (1, "runtime_unavailable")
        assert done.json["hint"]
    done = user.types("k8e sandbox create --runtime docker")
    assert (done.code, done.json["code"]) == (1, "invalid_argument")
    if user.runtime == "native":
        done = user.types("k8e sandbox create --runtime gvisor")
        assert (done.code, done.json["code"]) == (1, "runtime_unavailable"), "never weaker than asked"
        assert "runsc" in done.json["hint"]
