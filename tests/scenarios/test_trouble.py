"""What goes wrong on a working day: a hung command, Ctrl-C, a killed daemon, two things at once."""

from __future__ import annotations

import json
import signal
import subprocess

from tests.cli.machine import K8E, wait_until
from tests.scenarios.user import User

STUBBORN = "trap '' TERM INT; setsid sleep 1001 & sleep 1002 & echo begun; wait; sleep 1003"


def processes(user: User, session: str) -> str:
    """What runs inside, by the session's own eyes."""
    looking = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
    return str(user.run(looking, "--session-id", session).json["stdout"])


def test_a_hung_command_ends_at_its_time_with_all_its_children(user: User) -> None:
    script = f"""
        k8e sandbox run "{STUBBORN}" --timeout 1; echo $?
        k8e sandbox run "{STUBBORN}" --timeout 1 --raw; echo $?
    """
    answer, code, begun, raw = user.lines(script)
    told = json.loads(answer)
    assert (told["status"], told["exit_code"], told["stdout"]) == ("timed_out", 124, "begun\n")
    assert (code, begun, raw) == ("124", "begun", "124")
    assert "sleep 100" not in processes(user, told["session_id"])


def test_ctrl_c_at_a_terminal_ends_the_command_in_the_sandbox(user: User) -> None:
    """With a real terminal: the shell's whole foreground group gets the signal, as from a keyboard."""
    script = f"""
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execvp({str(K8E)!r}, ["k8e", "sandbox", "run", "--raw", sys.argv[1]])
said = b""
while b"begun" not in said:
    said += os.read(terminal, 1000)
os.write(terminal, b"\\x03")
try:
    while said := os.read(terminal, 1000):
        pass
except OSError:
    pass
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        ["python3", "-c", script, STUBBORN], env=user.env, cwd=user.home, capture_output=True, timeout=120
    )
    assert (done.stdout, done.stderr) == (f"{-signal.SIGINT}\n".encode(), b"")
    wait_until(lambda: user.running(user.session()) == [])
    assert "sleep 100" not in processes(user, user.session())


def test_after_the_daemon_was_killed_the_session_goes_on(user: User) -> None:
    first = user.run("echo kept > file; (while :; do echo >> beat; sleep 0.05; done) & true").json
    with user.daemon_killed():
        done = user.run("cat file; wc -l < beat")
    assert done.json.get("session_id") == first["session_id"], done
    kept, before = done.json["stdout"].split()
    assert kept == "kept"
    wait_until(lambda: int(user.run("wc -l < beat").json["stdout"]) > int(before))


def test_background_output_outlives_the_daemon(user: User) -> None:
    code = "echo early; until [ -e go ]; do sleep 0.05; done; head -c 300000 /dev/zero | tr '\\\\0' x; exit 3"
    run = user.types(f'k8e sandbox run "{code}" --background --timeout 100').json
    with user.daemon_killed():
        assert user.k8e("sandbox", "poll", run["run_id"]).json["status"] == "running"
    user.run("touch go")
    with user.daemon_killed():
        while (answer := user.k8e("sandbox", "poll", run["run_id"]).json)["status"] == "running":
            pass
    assert (answer["status"], answer["exit_code"], answer["stdout"]) == ("completed", 3, "early\n" + "x" * 300_000)
    with user.daemon_killed():
        assert user.k8e("sandbox", "poll", run["run_id"]).json == answer
        assert user.run("ls go").json["exit_code"] == 0


def test_a_run_whose_daemon_dies_says_so_and_is_not_run_again(user: User) -> None:
    user.run("true")
    with user.start("sandbox", "run", "echo once >> ledger; sleep 1000") as client:
        wait_until(lambda: user.run("cat ledger 2>/dev/null; true").json["stdout"] != "")
        user.kill_the_daemon()
        assert client.wait() == 1
        assert client.stdout
        told = json.loads(client.stdout.read())
    assert (told["code"], "log" in told["hint"]) == ("connection_lost", True)
    user.bring_the_daemon_back()
    assert user.run("cat ledger").json["stdout"] == "once\n"
    wait_until(lambda: user.running(user.session()) == [])
    log = user.k8e("sandbox", "log", user.session()).json["runs"]
    assert {run["status"] for run in log if run["exit_code"] is None or run["exit_code"] > 128} <= {"killed", "lost"}


def test_a_session_that_is_gone_is_replaced_once_and_its_command_not_repeated(user: User) -> None:
    script = """
        k8e sandbox run true | get session_id > first
        k8e sandbox destroy $(cat first) > /dev/null
        for number in 1 2 3; do k8e sandbox run 'echo x >> ledger' > /dev/null & done; wait
        k8e sandbox run 'wc -l < ledger' --raw
        k8e sandbox sessions | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["sessions"]))'
    """
    assert user.lines(script) == ["3", "1"]


def test_memory_and_disk_run_out_inside_and_it_is_said(user: User) -> None:
    script = """
        SID=$(k8e sandbox create --memory 128m --disk 64m | get session_id)
        k8e sandbox run 'b = b"x" * (300 << 20)' --lang python --session-id $SID | get status; echo
        SID=$(k8e sandbox create --disk 64m | get session_id)
        k8e sandbox run 'head -c 100000000 /dev/zero > big' --session-id $SID | get stderr
        k8e sandbox run 'echo still here' --session-id $SID --raw
    """
    status, complaint, alive = user.lines(script)
    assert status == "oom_killed"
    assert "No space left" in complaint
    assert alive == "still here"


def test_nobody_reads(user: User) -> None:
    script = """
        k8e sandbox run --raw yes | head -n 1
        k8e sandbox run 'sleep 0.2; echo late' --raw | true
        k8e sandbox run 'cat' --stdin --raw < /dev/null; echo $?
        k8e sandbox run 'echo closed' --raw <&-
    """
    assert user.lines(script) == ["y", "0", "closed"]
    wait_until(lambda: user.running(user.session()) == [])
