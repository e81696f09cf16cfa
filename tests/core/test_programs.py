"""Programs that are longer than an argument may be, and commands of another user."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from k8e.core.errors import Fault, Kind
from k8e.core.model import Language, RunResult, RunSpec, SessionSpec
from k8e.core.sandbox.programs import FOLDER, MAX_CODE, MAX_WORD, find_long_program
from k8e.core.service import Service
from k8e.engine import Shape
from k8e.engine.accounts import Account, find_account
from k8e.link.model import Sandbox
from tests.core.rig import ALICE, Rig, fault
from tests.sandboxes import needs_root

PADDING = "x" * (1 << 20)

PYTHON = {
    "what it finds": "import sys; print(__name__, sorted(globals()), sys.argv, sys.path[0], sys.stdin.read())",
    "its own argument": "import sys; print(len(sys.orig_argv), sys.orig_argv[:2], sys.orig_argv[2][:10])",
    "traceback": "\n\ndef f():\n    raise OSError\ntry:\n    f()\nexcept OSError as e:\n    raise KeyError from e",
    "syntax": "x = 1\nif\n",
    "exit": "import sys; sys.exit(3)",
    "exit with a text": "import sys; sys.exit('text')",
    "interrupt": "raise KeyboardInterrupt",
    "hook": "import sys\nsys.excepthook = lambda *a: print(a[0], a[2].tb_lineno, a[2].tb_next)\n1 / 0",
    "encoding": "# -*- coding: latin-1 -*-\nprint('grüße 你好')",
    "end": "import atexit; atexit.register(print, 'last'); class_ = type('A', (), {}); print(class_.__module__)",
    "future": "from __future__ import annotations\nx: nothing = 1\nprint(__annotations__)",
}
BASH = {
    "what it finds": "echo $0 $# $LINENO\n\necho $LINENO; cat; no_such_command; exit 4",
    "errexit": "set -e\nfalse\necho no",
    "here document": "cat <<X\nhi $0 `echo y` $'\\t'\nX",
    "trap": "trap 'echo last' EXIT; kill -TERM $$",
    "quotes": "echo 'a\\nb' \"$(echo x)\"; [[ a == a ]] && exit 7",
}
NODE = {
    "what it finds": (
        "var b = 2; let a = 1; console.log(__filename, process.argv.length, require.main, module.id, globalThis.b, "
        "typeof a, this === globalThis, require('fs').readFileSync(0, 'utf8'))"
    ),
    "exit": "process.exit(3)",
    "late error": "setTimeout(() => { throw new TypeError('late') }, 1)",
}
SAME = [
    *((Language.PYTHON, "#", name, code) for name, code in PYTHON.items()),
    *((Language.BASH, "#", name, code) for name, code in BASH.items()),
    *((Language.NODE, "//", name, code) for name, code in NODE.items()),
]


@pytest.fixture
async def session(rig: Rig) -> str:
    return await rig.create()


async def find_sandbox(rig: Rig, session: str) -> Sandbox:
    sandbox, _ = await rig.engine.attach(rig.sandbox_of(session))
    return sandbox


async def wait_until_removed(rig: Rig, session: str) -> None:
    """A program's file goes behind the answer."""
    sandbox = await find_sandbox(rig, session)
    while await sandbox.list_dir(FOLDER):
        pass  # each look asks the agent


def show(result: RunResult) -> tuple[int | None, bytes, bytes]:
    return result.exit_code, result.stdout, result.stderr


@needs_root
async def test_a_long_program_does_what_a_short_one_does(rig: Rig, session: str) -> None:
    service = rig.service
    for language, mark, name, code in SAME:
        long = f"{code}\n{mark} {PADDING}"
        short = f"{code}\n{mark} x"
        runs = [RunSpec(session, text, language, stdin=b"in", env={"PYTHONUTF8": "1"}) for text in (short, long)]
        one, other = [show(await service.runs.run(ALICE, run)) for run in runs]
        assert other == one, (language, name)
    await wait_until_removed(rig, session)


@needs_root
async def test_errors_of_a_long_program_name_its_lines(rig: Rig, session: str) -> None:
    for language, code, expected in (
        (
            Language.NODE,
            f"console.log(1)\n\nthrow new Error('no')\n// {PADDING}",
            b"[eval]:3\nthrow new Error('no')\n^",
        ),
        (Language.BASH, f"echo 1\nif\nthen\n# {PADDING}", b"bash: eval: line 3: syntax error"),
    ):
        result = await rig.service.runs.run(ALICE, RunSpec(session, code, language))
        assert result.exit_code
        assert expected in result.stderr, result.stderr[:2000]


@needs_root
@pytest.mark.parametrize(
    "argv",
    [
        ("bash", "-lc", "echo $0 $1", "name", "one"),
        ("sh", "-e", "-c", "echo $0 $1", "name", "one"),
        ("/usr/bin/python3", "-Ic", "import sys; print('name', *sys.argv[1:])", "one"),
    ],
)
async def test_a_long_program_in_an_argv(rig: Rig, session: str, argv: tuple[str, ...]) -> None:
    index = next(index for index, word in enumerate(argv) if " " in word)
    words = [f"{word}\n# {PADDING}" if place == index else word for place, word in enumerate(argv)]
    result = await rig.service.runs.run(ALICE, RunSpec(session, argv=tuple(word.encode() for word in words)))
    assert show(result) == (0, b"name one\n", b"")


@needs_root
async def test_a_long_program_in_the_background_leaves_no_file(rig: Rig, session: str) -> None:
    sandbox = await find_sandbox(rig, session)
    await rig.run(session, "mkfifo fifo")
    run = await rig.start_background(session, f"cat fifo # {PADDING}")
    assert [entry.name for entry in await sandbox.list_dir(FOLDER)] == [run.encode()]
    assert (await sandbox.stat(FOLDER)).mode == 0o1733
    assert (await sandbox.stat(FOLDER + b"/" + run.encode())).mode == 0o400
    await rig.run(session, "echo done > fifo")
    assert (await rig.poll_to_the_end(run)).stdout == b"done\n"
    await wait_until_removed(rig, session)


@needs_root
async def test_a_program_that_does_not_start_leaves_no_file(rig: Rig, session: str) -> None:
    with fault(Kind.INVALID, "workdir_not_found", "workdir"):
        await rig.service.runs.run(ALICE, RunSpec(session, f"true # {PADDING}", workdir="/none"))
    words = (b"sh", b"-c", f"true # {PADDING}".encode(), *[b"x"] * 500_000)
    with fault(Kind.INVALID, "invalid_argument", "argv"):
        await rig.service.runs.run(ALICE, RunSpec(session, argv=words))
    assert await (await find_sandbox(rig, session)).list_dir(FOLDER) == []


@needs_root
async def test_a_program_that_is_killed_leaves_no_file(rig: Rig, session: str) -> None:
    live = await rig.service.runs.start(ALICE, RunSpec(session, f"sleep 1000 # {PADDING}"))
    assert await (await find_sandbox(rig, session)).list_dir(FOLDER) != []
    await live.kill()
    await live.result()
    await wait_until_removed(rig, session)


def test_only_interpreters_take_a_long_argument() -> None:
    long = b"x" * (MAX_WORD + 1)
    assert find_long_program((b"cat", b"x" * MAX_WORD)) is None
    for argv in (
        (b"cat", long),
        (b"bash", long),
        (b"bash", b"script", b"-c", long),
        (b"bash", b"-c", b"true", long),
        (b"python3", b"-m", long),
        (b"python3", b"-c", long, long),
        (b"node", b"-p", long),
        (long, b"-c"),
    ):
        with pytest.raises(ValueError, match=r"argv\[\d\]"):
            find_long_program(argv)


@needs_root
async def test_a_program_has_a_limit(rig: Rig, session: str) -> None:
    code = ": " + "x" * (MAX_CODE - 2)
    assert (await rig.run(session, code)).exit_code == 0
    with fault(Kind.INVALID, "invalid_argument", "code"):
        await rig.run(session, code + "x")


# Users


async def who(service: Service, session: str, user: str, code: str = "id -u; id -g; echo $HOME") -> bytes:
    result = await service.runs.run(ALICE, RunSpec(session, code, user=user))
    assert result.exit_code == 0, result
    return result.stdout


@needs_root
async def test_a_command_runs_as_the_user_that_is_named(rig: Rig, session: str) -> None:
    default = await who(rig.service, session, "")
    assert default == b"20001\n20001\n/workspace\n"
    for name, expected in (
        ("user", default),
        ("20001", default),
        ("root", b"0\n0\n/root\n"),
        ("0:20001", b"0\n20001\n/root\n"),
        ("4711", b"4711\n0\n/\n"),
        ("4711:user", b"4711\n20001\n/\n"),
    ):
        assert await who(rig.service, session, name) == expected, name
    assert await who(rig.service, session, "root", "grep CapEff /proc/self/status") == b"CapEff:\t0000000000000000\n"
    assert await who(rig.service, session, "root", f"id -u # {PADDING}") == b"0\n"
    run = await rig.service.runs.run(ALICE, RunSpec(session, "id -u", user="root", background=True))
    assert (await rig.poll_to_the_end(run.run_id)).stdout == b"0\n"
    assert await who(rig.service, session, "") == default


@needs_root
async def test_a_user_that_is_not_there_is_refused(rig: Rig, session: str) -> None:
    for name in ("nobody_here", "user:nobody_here", "65536", "99999999999999"):
        with fault(Kind.INVALID, "user_not_found", "user"):
            await rig.service.runs.run(ALICE, RunSpec(session, "true", user=name))
    for name in ("a\nb", "x" * 129):
        with fault(Kind.INVALID, "invalid_argument", "user"):
            await rig.service.runs.run(ALICE, RunSpec(session, "true", user=name))
    assert [run["user"] for run in rig.read_audit() if run["event"] == "run_started"] == []


@needs_root
@pytest.mark.parametrize("name", ["passwd", "group"])
async def test_a_large_file_of_users_does_not_hold_up_the_daemon(
    rig: Rig, session: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def find(*args: Any) -> Account:
        threads.append(threading.current_thread())
        return find_account(*args)

    monkeypatch.setattr("k8e.core.sandbox.users.find_account", find)
    file = rig.engine._top(rig.sandbox_of(session)) / name
    with file.open("a") as output:
        output.write("a::1:1::\n" * 7000)
    assert await who(rig.service, session, "root", "id -u") == b"0\n"
    assert threading.main_thread() not in threads
    with file.open("a") as output:
        output.write("a::1:1::\n" * 300)
    with fault(Kind.INVALID, "user_not_found", "user"):
        await rig.service.runs.run(ALICE, RunSpec(session, "true", user="root"))
    assert len(threads) == 1
    assert (await rig.run(session, "true")).exit_code == 0


@needs_root
async def test_a_powerless_session_has_one_user(rig: Rig) -> None:
    session = await rig.create(spec=SessionSpec(shape=Shape(powerless=True)))
    assert await who(rig.service, session, "user", "id -u") == b"20001\n"
    for name in ("root", "4711", "user:0", "20001:0"):
        with fault(Kind.DENIED, "user_refused", "user"):
            await rig.service.runs.run(ALICE, RunSpec(session, "true", user=name))


@needs_root
async def test_programs_are_their_users_own(rig: Rig, session: str) -> None:
    live = await rig.service.runs.start(ALICE, RunSpec(session, f"sleep 1000 # {PADDING}"))
    folder, file = FOLDER.decode(), f"{FOLDER.decode()}/{live.run_id}"
    for user in ("", "4711"):
        result = await rig.service.runs.run(ALICE, RunSpec(session, f"ls {folder}; rmdir {folder}", user=user))
        assert (result.exit_code, result.stdout) == (1, b"")
    for attempt in (f"cat {file}", f"rm -f {file}", f"mv {file} {file}2", f"ln {file} /tmp/other"):
        result = await rig.service.runs.run(ALICE, RunSpec(session, attempt, user="4711"))
        assert (result.exit_code, result.stdout) == (1, b""), attempt
    await live.kill()
    await live.result()


@needs_root
async def test_a_hostile_root_inside_spoils_its_own_programs_only(rig: Rig, session: str) -> None:
    """Whatever stands where the file is to be: the agent is asked for it, and follows nothing out of the sandbox."""
    folder = FOLDER.decode()
    tricks = ("ln -s /workspace F", "ln -s F F", "touch F", "mkfifo F", "mkdir F; chmod 0 F", "ln -s /proc/1/root F")
    for trick in tricks:
        await who(rig.service, session, "root", f"rm -rf {folder}; {trick.replace('F', folder)}; id -u")
        with contextlib.suppress(Fault):
            result = await rig.run(session, f"echo done # {PADDING}")
            assert (result.exit_code, result.stdout) in ((0, b"done\n"), (126, b"")), trick
    await who(rig.service, session, "root", f"rm -rf {folder}; chmod 755 /")
    assert (await rig.run(session, f"echo done # {PADDING}")).stdout == b"done\n"
    assert not await rig.service.runs.commands(ALICE, session)
