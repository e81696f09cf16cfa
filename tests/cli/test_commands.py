"""Every command but run: exact shapes, exit codes, help."""

from __future__ import annotations

import pytest

from tests.cli.machine import Machine

SUBCOMMANDS = [
    "run",
    "create",
    "get",
    "allow-hosts",
    "sessions",
    "destroy",
    "write",
    "read",
    "list",
    "status",
    "poll",
    "kill",
    "ps",
    "log",
]


@pytest.fixture
def session(machine: Machine) -> str:
    return str(machine.k8e("sandbox", "create").json["session_id"])


class TestSessions:
    def test_create_with_wishes(self, machine: Machine) -> None:
        words = ["--session-id", "wished", "--tenant", "web", "--runtime", "native", "--env", "KEY=it's secret"]
        words += ["--cpus", "2", "--memory", "1.5g", "--disk", "3GiB", "--ttl", "15m"]
        created = machine.k8e("sandbox", "create", *words).json
        assert (created["session_id"], created["runtime"], created["policy"]["ttl"]) == ("wished", "native", 900)
        limits = created["policy"]["limits"]
        assert (limits["cpus"], limits["memory"], limits["disk"]) == (2, 3 << 29, 3 << 30)
        shown = machine.k8e("sandbox", "get", "wished")
        assert (shown.json["tenant_id"], shown.json["env_keys"]) == ("web", ["KEY"])
        assert b"secret" not in shown.stdout
        assert machine.run('printf %s "$KEY"', "--session-id", "wished").json["stdout"] == "it's secret"
        assert machine.k8e("sandbox", "destroy", "wished").json == {"ok": True}

    def test_the_same_id_twice_has_one_winner(self, machine: Machine) -> None:
        assert machine.k8e("sandbox", "create", "--session-id", "twice").code == 0
        done = machine.k8e("sandbox", "create", "--session-id", "twice")
        assert (done.code, done.json["code"]) == (1, "session_exists")
        machine.k8e("sandbox", "destroy", "twice")

    def test_a_runtime_that_does_not_work_says_what_to_do(self, machine: Machine) -> None:
        done = machine.k8e("sandbox", "create", "--runtime", "gvisor")
        assert (done.code, done.json["code"], done.json["hint"]) == (1, "runtime_unavailable", "use native")
        done = machine.k8e("sandbox", "create", "--runtime", "docker")
        assert (done.code, done.json["field"]) == (1, "runtime")

    @pytest.mark.parametrize("words", [["--memory", "much"], ["--ttl", "1y"], ["--cpus", "x"], ["--disk", "1.2.3g"]])
    def test_nonsense_is_a_usage_error(self, machine: Machine, words: list[str]) -> None:
        done = machine.k8e("sandbox", "create", *words)
        assert (done.code, done.json["code"]) == (1, "usage")

    def test_list(self, machine: Machine, session: str) -> None:
        assert session in machine.live_sessions()
        machine.k8e("sandbox", "destroy", session)
        assert session not in machine.live_sessions()
        every = machine.k8e("sandbox", "sessions", "--phase", "all").json["sessions"]
        assert {one["session_id"]: one["phase"] for one in every}[session] == "destroyed"

    @pytest.mark.parametrize("words", [["get"], ["destroy"], ["ps"], ["log"], ["list"], ["read", "x"], ["write", "x"]])
    def test_one_that_does_not_exist(self, machine: Machine, words: list[str]) -> None:
        command, *rest = words
        done = machine.k8e("sandbox", command, "nope", *rest)
        assert (done.code, done.json["code"]) == (1, "session_not_found")

    def test_a_name_that_looks_like_a_path_is_none(self, machine: Machine) -> None:
        done = machine.k8e("sandbox", "get", "../sessions?phase=all")
        assert (done.code, done.json["field"]) == (1, "session_id")


class TestFiles:
    def test_write_append_and_read(self, machine: Machine, session: str) -> None:
        path = "/workspace/a b/ü?&#%.txt"
        done = machine.k8e("sandbox", "write", session, path, stdin=b"one\n")
        assert done.json == {"ok": True, "path": path, "bytes": 4}
        machine.k8e("sandbox", "write", session, path, "--mode", "a", stdin="zwölf\n".encode())
        answer = machine.k8e("sandbox", "read", session, path).json
        assert answer == {"content": "one\nzwölf\n", "path": path, "encoding": "utf-8"}
        assert machine.k8e("sandbox", "read", session, path, "--raw").stdout == "one\nzwölf\n".encode()

    def test_any_bytes(self, machine: Machine, session: str) -> None:
        content = bytes(range(256)) * 1000
        machine.k8e("sandbox", "write", session, "blob", stdin=content)
        assert machine.k8e("sandbox", "read", session, "/workspace/blob", "--raw").stdout == content
        answer = machine.k8e("sandbox", "read", session, "blob").json
        assert (answer["encoding"], len(answer["content"])) == ("base64", 341_336)

    def test_errors_are_json_also_with_raw(self, machine: Machine, session: str) -> None:
        done = machine.k8e("sandbox", "read", session, "nope", "--raw")
        assert (done.code, done.json["code"]) == (1, "file_not_found")

    def test_too_much_is_refused(self, machine: Machine, session: str) -> None:
        """One message has so much; files have no such limit (test_pipes.py)."""
        done = machine.run("cat", "--stdin", "--session-id", session, stdin=bytes((64 << 20) + 1))
        assert (done.code, done.json["code"]) == (1, "message_too_large")

    def test_list(self, machine: Machine, session: str) -> None:
        machine.run("mkdir d; echo hi > d/f; touch -d @1000000000 old", "--session-id", session)
        files = machine.k8e("sandbox", "list", session).json["files"]
        assert {file["path"]: (file["type"], file["size"]) for file in files if file["type"] == "file"} == {
            "/workspace/d/f": ("file", 3),
            "/workspace/old": ("file", 0),
        }
        assert {file["modified"] for file in files if file["path"].endswith("old")} == {1_000_000_000.0}
        recent = machine.k8e("sandbox", "list", session, "--since", "1100000000").json["files"]
        assert "/workspace/old" not in [file["path"] for file in recent]
        below = machine.k8e("sandbox", "list", session, "--path", "/workspace/d").json["files"]
        assert [file["path"] for file in below] == ["/workspace/d/f"]


class TestStatus:
    def test_before_the_first_run(self, machine: Machine) -> None:
        status = machine.k8e("sandbox", "status").json
        expected = {"available": True, "session_id": None, "tenant_id": "default", "runtime": "native", "warm": 0}
        assert status | expected == status
        assert not (machine.home / ".k8e").exists(), "asking changes nothing"

    def test_after_it(self, machine: Machine) -> None:
        machine.run("true", "--tenant", "web")
        status = machine.k8e("sandbox", "status", "--tenant", "web").json
        expected = {"session_id": machine.session("web"), "tenant_id": "web"}
        assert status | expected == status
        machine.k8e("sandbox", "destroy", machine.session("web"))
        assert machine.k8e("sandbox", "status", "--tenant", "web").json["session_id"] is None


class TestRuns:
    def test_log_tells_how_each_ended(self, machine: Machine, session: str) -> None:
        for code in ("exit 0", "exit 3"):
            machine.run(code, "--session-id", session)
        runs = machine.k8e("sandbox", "log", session).json["runs"]
        assert [run["exit_code"] for run in runs] == [0, 3]
        assert not any("stdout" in run for run in runs)

    @pytest.mark.parametrize("command", ["poll", "kill"])
    def test_one_that_does_not_exist(self, machine: Machine, command: str) -> None:
        done = machine.k8e("sandbox", command, "run-0000000000000000")
        assert (done.code, done.json["code"]) == (1, "run_not_found")


class TestEmptyWords:
    """`--session-id "$SID"` where there is no SID: never another session than the one that the caller meant."""

    @pytest.mark.parametrize(
        "option", ["--session-id", "--tenant", "--workdir", "--manifest", "--git-repo", "--git-ref"]
    )
    def test_run(self, machine: Machine, option: str) -> None:
        done = machine.run("true", option, "")
        assert (done.code, done.json["code"]) == (1, "usage")
        assert option in done.json["error"]

    @pytest.mark.parametrize("option", ["--session-id", "--tenant", "--image", "--runtime", "--manifest", "--git-repo"])
    def test_create(self, machine: Machine, option: str) -> None:
        done = machine.k8e("sandbox", "create", f"{option}=")
        assert (done.code, done.json["code"]) == (1, "usage")

    def test_the_gateway(self, machine: Machine) -> None:
        assert machine.k8e("--endpoint", "", "sandbox", "status").json["code"] == "usage"


class TestUsage:
    @pytest.mark.parametrize(
        ("words", "hint"),
        [
            (["run", "python3", "job.py"], "in quotes; `--` before it"),
            (["run", "true", "--endpoint", "a:1"], "--endpoint stands before the command"),
            (["run", "true", "--lan", "python"], "did you mean --lang?; `k8e sandbox run --help`"),
            (["destroy", "one", "two"], "`k8e sandbox destroy --help`"),
        ],
    )
    def test_words_that_are_too_much(self, machine: Machine, words: list[str], hint: str) -> None:
        done = machine.k8e("sandbox", *words)
        assert (done.code, done.json["code"]) == (1, "usage")
        assert hint in done.json["hint"]
        assert done.json["detail"] == ""

    @pytest.mark.parametrize(
        ("words", "error", "nearest"),
        [
            (["sandbx", "run", "true"], "there is no command 'sandbx'", "did you mean sandbox?"),
            (["sandbox", "rnu", "true"], "there is no command 'rnu'", "did you mean run?"),
            (["run", "true"], "there is no command 'run'", "did you mean `k8e sandbox run`?"),
            (["sandbox", "run", "true", "--timout=5"], "there is no option --timout", "did you mean --timeout?"),
            (["sandbox", "sessions", "--phase", "al"], "--phase: 'al' is none of active, all", "did you mean all?"),
            (["sandbox", "get"], "SID is missing", "`k8e sandbox get --help`"),
            (["sandbox"], "COMMAND is missing", "`k8e sandbox --help`"),
            (["sandbox", "run", "x", "--zzz"], "there is no option --zzz", "`k8e sandbox run --help`"),
        ],
    )
    def test_the_mistake_is_named_and_the_nearest_word(
        self, machine: Machine, words: list[str], error: str, nearest: str
    ) -> None:
        done = machine.k8e(*words)
        assert (done.code, done.json["code"], done.json["error"]) == (1, "usage", error)
        assert nearest in done.json["hint"]
        assert b"usage:" not in done.stdout
        assert len(done.stdout) < 300

    def test_a_language_that_there_is_not(self, machine: Machine) -> None:
        assert "bash, python, node (or js) or ts" in machine.run("x", "--lang", "ruby").json["error"]

    def test_javascript_has_two_names(self, machine: Machine) -> None:
        for words in (["--lang", "js"], ["--lang=js", "--timeout=20s"]):
            assert machine.run("console.log(6 * 7)", *words).json["stdout"] == "42\n"

    @pytest.mark.parametrize("time", ["0", "-1", "25h", "2d", "86401", "nan", "inf", "5x", "m"])
    def test_a_timeout_says_its_range(self, machine: Machine, time: str) -> None:
        done = machine.run("true", f"--timeout={time}")
        assert (done.code, done.json["code"]) == (1, "usage")
        assert "more than 0, at most 1d" in done.json["error"]

    @pytest.mark.parametrize("time", ["15m", "0.5h", "1d", "86400", "90s", "7.5"])
    def test_a_timeout_is_a_span_of_time(self, machine: Machine, time: str) -> None:
        assert machine.run("true", "--timeout", time).code == 0

    def test_no_time_at_all_is_not_the_usual_one(self, machine: Machine) -> None:
        done = machine.k8e("sandbox", "create", "--ttl", "0")
        assert (done.code, done.json["field"]) == (1, "ttl")

    def test_the_value_of_a_secret_is_not_repeated(self, machine: Machine) -> None:
        done = machine.k8e("sandbox", "create", "--secret", "TOKEN=hunter2")
        assert (done.code, done.json["code"]) == (1, "usage")
        assert b"hunter2" not in done.stdout

    def test_a_manifest_without_an_end(self, machine: Machine) -> None:
        done = machine.k8e("sandbox", "create", "--manifest", "/dev/zero")
        assert (done.code, done.json["code"]) == (1, "message_too_large")


class TestGlobalFlags:
    # tests/gateway has what they are for.
    @pytest.mark.parametrize(
        ("flag", "code"),
        [("--endpoint", "bad_endpoint"), ("--apikey", "bad_apikey"), ("--profile", "no_such_profile")],
    )
    def test_mean_another_machine_and_so_do_their_variables(self, machine: Machine, flag: str, code: str) -> None:
        flagged = machine.k8e(flag, "http://x/", "sandbox", "run", "true")
        variable = "K8E_SANDBOX_" + flag[2:].upper()
        named = machine.run("true", env={variable: "http://x/"})
        for done in (flagged, named):
            assert (done.code, done.json["code"]) == (1, code)


class TestHelp:
    @pytest.mark.parametrize(
        "words", [[], ["sandbox"], ["server"], ["doctor"], *(["sandbox", one] for one in SUBCOMMANDS)]
    )
    def test_is_there_for_every_command(self, machine: Machine, words: list[str]) -> None:
        done = machine.k8e(*words, "--help")
        assert (done.code, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"usage: k8e")
        assert len(done.stdout.splitlines()) > 5
        assert max(map(len, done.stdout.decode().splitlines())) <= 110

    def test_has_examples(self, machine: Machine) -> None:
        assert b'k8e sandbox run "print(' in machine.k8e("--help").stdout

    def test_the_version(self, machine: Machine) -> None:
        done = machine.k8e("--version")
        assert (done.code, done.stdout.split()[0]) == (0, b"k8e")

    @pytest.mark.parametrize("words", [["sandbox"], ["nonsense"], ["sandbox", "nonsense"], ["sandbox", "get"]])
    def test_nonsense_is_a_usage_error(self, machine: Machine, words: list[str]) -> None:
        done = machine.k8e(*words)
        assert (done.code, done.json["code"]) == (1, "usage")
        assert "--help` says what there is" in done.json["hint"]
