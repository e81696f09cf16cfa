"""Everything the protocol can say, for hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from k8e.link.codec import frames as f
from k8e.link.codec.protocol import MAX_WINDOW, MIN_WINDOW, WINDOW_STEP
from k8e.link.codec.records import IN_Q_OVERFLOW, Attachment
from k8e.link.codec.requests import KEEP_MODE, FileRequest
from k8e.link.errors import Code
from k8e.link.model import (
    Cause,
    CommandInfo,
    Entry,
    ExecSpec,
    FileType,
    Identity,
    Outcome,
    Rlimit,
    TerminalSize,
    WatchEvent,
)

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ids = st.integers(1, 2**64 - 1)
nonces = st.binary(min_size=16, max_size=16)
names = st.binary(max_size=300).map(lambda name: name.replace(b"\0", b"\xff"))
content = st.binary(min_size=1, max_size=5000) | st.just(b"\0" * 65536)
milliseconds = st.integers(0, 2**32 - 1).map(lambda count: count / 1000)
account = st.none() | st.integers(0, 2**32 - 2)

agent_frames: st.SearchStrategy[f.Frame] = st.one_of(
    st.builds(f.Data, ids, st.sampled_from([1, 2]), u64, content),
    st.builds(f.Eof, ids, st.sampled_from([0, 1, 2]), u64),
    st.builds(f.Ack, ids, st.just(0), u64),
    st.builds(f.Opened, ids, st.binary(max_size=300)),
    st.builds(f.Result, ids, st.sampled_from(Code), u32, st.binary(max_size=300)),
    st.builds(f.Pong, u64),
    st.builds(f.Goodbye, st.sampled_from(f.GoodbyeReason)),
    st.builds(
        f.AgentHello, u16, nonces, nonces, st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)
    ).filter(lambda hello: len(hello.version) <= 64),
)

identities = st.builds(Identity, account, account, st.lists(st.integers(0, 2**32 - 2), max_size=5).map(tuple))
specs = st.builds(
    ExecSpec,
    argv=st.lists(names, min_size=1, max_size=5).map(tuple),
    env=st.lists(st.tuples(names.map(lambda name: b"N" + name.replace(b"=", b"_")), names), max_size=5).map(tuple),
    cwd=names.map(lambda name: b"/" + name),
    identity=identities,
    stdin=st.booleans(),
    terminal=st.none() | st.builds(TerminalSize, u16, u16),
    timeout=st.none() | st.integers(1, 2**32 - 1).map(lambda count: count / 1000),
    grace=milliseconds,
    drain=milliseconds,
    window=st.integers(MIN_WINDOW // WINDOW_STEP, MAX_WINDOW // WINDOW_STEP).map(lambda count: count * WINDOW_STEP),
    umask=st.integers(0, 0o777),
    rlimits=st.lists(st.builds(Rlimit, u32, u64, u64), max_size=4).map(tuple),
    detached=st.booleans(),
    keep_capabilities=st.booleans(),
    parked=st.booleans(),
)
file_operations = st.sampled_from(
    [*(f.FrameType(number) for number in range(f.FrameType.READ, f.FrameType.CONNECT + 1)), f.FrameType.BIND]
)
file_requests = st.builds(
    FileRequest,
    file_operations,
    names,
    names,
    u32,
    st.integers(0, 0o7777) | st.just(KEEP_MODE),
    u64,
    u64,
    st.builds(Identity, account, account),
)

host_frames: st.SearchStrategy[f.Frame] = st.one_of(
    st.builds(f.Data, ids, st.just(0), u64, content),
    st.builds(f.Eof, ids, st.just(0), u64),
    st.builds(f.Ack, ids, st.sampled_from([1, 2]), u64),
    st.builds(f.Ping, u64),
    st.builds(f.HostHello, u16, u16, nonces),
    st.builds(f.Signal, ids, u32, u32),
    st.builds(f.End, ids, u32),
    st.builds(f.Resize, ids, u16, u16),
    st.builds(f.Order, ids, st.sampled_from([f.FrameType.DETACH, f.FrameType.RELEASE, f.FrameType.CANCEL])),
    st.builds(f.Request, ids, st.just(f.FrameType.EXEC), st.binary(min_size=52, max_size=3000)),
    st.builds(f.Request, ids, st.just(f.FrameType.ATTACH), st.binary(min_size=16, max_size=16)),
    st.builds(f.Request, ids, st.just(f.FrameType.COMMANDS), st.just(b"")),
    st.builds(f.Request, ids, st.just(f.FrameType.PARK), st.binary(min_size=60, max_size=200)),
    st.builds(f.Request, ids, file_operations, st.binary(min_size=40, max_size=3000)),
)


def _made_possible(entry: Entry, target: bytes, unreadable: bool) -> Entry:
    if entry.type is FileType.SYMLINK:
        return replace(entry, target=target)
    return replace(entry, unreadable=unreadable and entry.type is FileType.DIRECTORY)


entries = st.builds(
    _made_possible,
    st.builds(
        Entry,
        names,
        st.sampled_from(FileType),
        st.integers(0, 0o7777),
        u32,
        u32,
        u64,
        st.integers(-(2**63), 2**63 - 1),
    ),
    names,
    st.booleans(),
)
events = st.builds(
    lambda mask, cookie, name: WatchEvent(mask, cookie, name, bool(mask & IN_Q_OVERFLOW)), u32, u32, names
)
endings = st.tuples(st.integers(0, 255), st.none()) | st.tuples(st.none(), st.integers(1, 64))
seconds = st.integers(0, 2**40).map(lambda count: count / 1e6)
outcomes = st.builds(
    lambda end, outcome: replace(outcome, exit_code=end[0], signal=end[1]),
    endings,
    st.builds(Outcome, st.none(), st.none(), st.sampled_from(Cause), u64, u64, seconds, seconds, seconds, u64),
)
attachments = st.builds(Attachment, u32, st.booleans(), u64, u64, u64, st.booleans(), st.booleans()).map(
    lambda any_: any_._replace(copied=any_.copied and any_.handed_over)
)


def _command(
    numbers: tuple[int, int, int, int],
    end: tuple[int | None, int | None] | None,
    cause: Cause,
    name: bytes,
    there: bool,
) -> CommandInfo:
    command, pid, stdout, stderr = numbers
    exit_code, signal = end or (None, None)
    return CommandInfo(
        command, pid, end is None, there, exit_code, signal, cause if end else None, 1.25, stdout, stderr, name
    )


commands = st.builds(
    _command, st.tuples(ids, u32, u64, u64), st.none() | endings, st.sampled_from(Cause), names, st.booleans()
)
