"""Scenario 5 of the skill's document: sub-agents that work side by side, and what they must not be able to do."""

from __future__ import annotations

import json

import pytest

from tests.scenarios.user import User

JQ = 'command -v jq > /dev/null || jq() { get "${2#.}"; }\n'

SCENARIO = """
PARENT=$(k8e sandbox create | jq -r .session_id)
for one in a b; do
    k8e sandbox write $PARENT /workspace/task_$one.py > /dev/null <<END
import pathlib, time
print("begun $one", flush=True)
pathlib.Path("half_$one").write_text("by $one")
pathlib.Path("half_$one").rename("done_$one")  # whoever sees it sees all of it
while not all(pathlib.Path("done_" + each).exists() for each in "ab"):
    time.sleep(0.01)
print("$one saw", *sorted(path.read_text() for path in pathlib.Path(".").glob("done_*")))
END
done
SUB1=$(k8e sandbox subagent $PARENT | jq -r .session_id)
SUB2=$(k8e sandbox subagent $PARENT | jq -r .session_id)
k8e sandbox run "python3 task_a.py" --session-id $SUB1 --raw > out_a &
k8e sandbox run "python3 task_b.py" --session-id $SUB2 --raw > out_b &
wait
cat out_a out_b
k8e sandbox run 'cat done_a; echo; cat done_b; echo' --session-id $PARENT --raw
k8e sandbox run 'echo from the parent > note' --session-id $PARENT > /dev/null
k8e sandbox read $SUB1 /workspace/note --raw
"""


def test_parallel_sub_agents(user: User) -> None:
    lines = user.lines(JQ + SCENARIO)
    expected = [f"begun {one}|{one} saw by a by b" for one in "ab"]
    assert lines == [*"|".join(expected).split("|"), "by a", "by b", "from the parent"]


def test_eight_write_to_one_workspace(user: User) -> None:
    """All at once, made and used: lines of their own into files of their own, and names that all of them see."""
    script = """
        PARENT=$(k8e sandbox create | jq -r .session_id)
        for number in 1 2 3 4 5 6 7 8; do
            (
                SUB=$(k8e sandbox subagent $PARENT --cpus 0.25 --memory 128m | jq -r .session_id)
                k8e sandbox run "seq 500 > part.$number; mkdir taken 2> /dev/null && echo won" --session-id $SUB --raw
            ) > out.$number &
        done
        wait
        cat out.* | wc -l
        COUNT='cat part.* | wc -l; cat part.* | sort -n | uniq -c | sort -rn | head -n1'
        k8e sandbox run "$COUNT" --session-id $PARENT --raw
        k8e sandbox get $PARENT | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["children"]))'
        k8e sandbox destroy $PARENT > /dev/null
        k8e sandbox sessions
    """
    winners, lines, most, children, sessions = user.lines(JQ + script)
    assert (winners, lines, most.split()[0], children) == ("1", "4000", "8", "8")
    assert json.loads(sessions) == {"sessions": []}


def test_a_child_has_nothing_of_its_parent_but_the_workspace(user: User) -> None:
    """Nor of its brother: no process to see or signal, no /tmp, no variable, no port."""
    script = """
        PARENT=$(k8e sandbox create --env SECRET=1 | jq -r .session_id)
        ONE=$(k8e sandbox subagent $PARENT --env SECRET=2 | jq -r .session_id)
        TWO=$(k8e sandbox subagent $PARENT | jq -r .session_id)
        SERVE='echo x > /tmp/mine
            python3 -m http.server 8099 > /dev/null 2>&1 &
            until (exec 3<>/dev/tcp/127.0.0.1/8099) 2> /dev/null; do sleep 0.05; done
            touch ready.$SECRET
            exec -a visible sleep 300'
        for each in $PARENT $ONE; do
            k8e sandbox run "$SERVE" --session-id $each --background --timeout 300 > /dev/null
        done
        LOOK='until [ -e ready.1 ] && [ -e ready.2 ]; do sleep 0.05; done
              ls /tmp/mine; env | grep SECRET; cat /proc/[0-9]*/cmdline | tr "\\0" "\\n" | grep -c "^visible"
              kill -9 -1; (exec 3<>/dev/tcp/127.0.0.1/8099) && echo connected; true'
        k8e sandbox run "$LOOK" --session-id $TWO --raw 2> /dev/null
        for each in $PARENT $ONE; do k8e sandbox ps $each; done
    """
    count, *alive = user.lines(JQ + script)
    assert count == "0"
    for processes in alive:
        assert [one["running"] for one in json.loads(processes)["processes"]] == [True]


def test_a_child_that_asks_for_more_is_refused(user: User) -> None:
    parent = user.k8e("sandbox", "create", "--allowed-hosts", "a.example,*.b.example", "--memory", "256m").json
    sid = parent["session_id"]
    wishes = [
        (["--allowed-hosts", "a.example,evil.example"], "beyond_parent", "allowed_hosts"),
        (["--allowed-hosts", "b.example"], "beyond_parent", "allowed_hosts"),
        (["--memory", "257m"], "beyond_parent", "limits.memory"),
        (["--cpus", "1.1"], "beyond_parent", "limits.cpus"),
        (["--ttl", "2h"], "beyond_parent", "ttl"),
        (["--workspace-path", "/etc"], "invalid_argument", "workspace_path"),
        (["--workspace-path", "../x"], "invalid_argument", "workspace_path"),
    ]
    if user.runtime == "gvisor":
        wishes.append((["--runtime", "native"], "beyond_parent", "runtime"))
    for words, code, field in wishes:
        done = user.k8e("sandbox", "subagent", sid, *words)
        assert (done.code, done.json["code"], done.json["field"]) == (1, code, field), words
    child = user.k8e("sandbox", "subagent", sid).json
    assert child["policy"]["limits"] == parent["policy"]["limits"]
    done = user.k8e("sandbox", "subagent", child["session_id"])
    assert (done.code, done.json["code"]) == (1, "child_of_child")
    done = user.k8e("sandbox", "allow-hosts", child["session_id"], "--add", "evil.example")
    assert (done.code, done.json["code"]) == (1, "beyond_parent")
    user.k8e("sandbox", "allow-hosts", sid, "--remove", "a.example")
    assert user.k8e("sandbox", "allow-hosts", child["session_id"]).json["policy"]["allowed_hosts"] == ["*.b.example"]
    user.k8e("sandbox", "destroy", sid)
    for words in (["subagent", sid], ["run", "true", "--session-id", child["session_id"]]):
        done = user.k8e("sandbox", *words)
        assert (done.code, done.json["code"]) == (1, "session_not_found")


def test_a_child_may_be_isolated_better_than_its_parent(user: User) -> None:
    if user.runtime != "gvisor":
        pytest.skip("there is nothing better than native here")
    script = """
        PARENT=$(k8e sandbox create --runtime native | jq -r .session_id)
        SUB=$(k8e sandbox subagent $PARENT --runtime gvisor | jq -r .session_id)
        k8e sandbox run 'echo asked > one' --session-id $PARENT --raw
        k8e sandbox run 'cat one; echo answered > two; rm one' --session-id $SUB --raw
        k8e sandbox run 'cat two; stat -c %u two; ls' --session-id $PARENT --raw
    """
    assert user.lines(JQ + script) == ["asked", "answered", "1000", "two"]


def test_a_child_that_only_looks_sees_what_is_written_meanwhile(user: User) -> None:
    script = """
        PARENT=$(k8e sandbox create | jq -r .session_id)
        SUB=$(k8e sandbox subagent $PARENT --agent-type reviewer --read-only --powerless | jq -r .session_id)
        LOOK='until [ -s page ]; do sleep 0.05; done; cat page; echo x > page; rm page; touch new'
        k8e sandbox run "$LOOK" --session-id $SUB --raw > seen 2> /dev/null &
        echo written later | k8e sandbox write $PARENT page > /dev/null
        wait
        cat seen
        k8e sandbox run 'cat page; ls' --session-id $PARENT --raw
    """
    assert user.lines(JQ + script) == ["written later", "written later", "page"]


def test_the_family_outlives_the_daemon_and_ends_together(user: User) -> None:
    script = """
        PARENT=$(k8e sandbox create | jq -r .session_id)
        SUB=$(k8e sandbox subagent $PARENT --workspace-path part | jq -r .session_id)
        k8e sandbox run 'echo kept > file' --session-id $SUB > /dev/null
        echo $PARENT $SUB
    """
    parent, child = user.lines(JQ + script)[0].split()
    with user.daemon_killed():
        assert user.k8e("sandbox", "get", parent).json["children"] == [child]
        assert user.k8e("sandbox", "run", "pwd; cat file", "--session-id", child, "--raw").stdout == (
            b"/workspace/part\nkept\n"
        )
        assert user.k8e("sandbox", "read", parent, "part/file", "--raw").stdout == b"kept\n"
        user.k8e("sandbox", "destroy", parent)
        assert user.k8e("sandbox", "get", child).json["code"] == "session_not_found"
        assert user.live_sessions() == []
