"""What requests carry and agents answer, both ways and against nonsense."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.link.codec.frames import FrameType
from k8e.link.codec.protocol import MAX_REQUEST
from k8e.link.codec.records import (
    MAX_NAME,
    MAX_RECORD,
    Attachment,
    RecordReader,
    parse_attachment,
    parse_command,
    parse_count,
    parse_entry,
    parse_event,
    parse_only_entry,
    parse_outcome,
    parse_stage,
)
from k8e.link.codec.requests import (
    Environments,
    FileRequest,
    effective_window,
    encode_attach,
    encode_exec,
    milliseconds,
)
from k8e.link.errors import ProtocolViolation, Stage
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
from tests.link import strategies
from tests.link.agent_codec import (
    decode_attach,
    decode_exec,
    decode_file_request,
    encode_command,
    encode_entry,
    encode_event,
    encode_outcome,
    encode_record,
)

cuts = st.lists(st.integers(1, 50), max_size=60)


@given(strategies.specs)
def test_a_spec_comes_back_as_it_was(spec: ExecSpec) -> None:
    assert decode_exec(encode_exec(spec)) == spec


@given(st.lists(strategies.specs, min_size=1, max_size=5))
def test_an_environment_that_is_encoded_once_is_never_that_of_another_command(specs: list[ExecSpec]) -> None:
    environments = Environments()
    for spec in [*specs, *specs, *reversed(specs)]:
        assert encode_exec(spec, environments.encode(spec.env)) == encode_exec(spec)


@given(strategies.file_requests)
def test_a_file_request_comes_back_as_it_was(request: FileRequest) -> None:
    assert decode_file_request(request.operation, request.encode()) == request


@given(strategies.u64, strategies.u64)
def test_attach_comes_back_as_it_was(stdout_from: int, stderr_from: int) -> None:
    assert decode_attach(encode_attach(stdout_from, stderr_from)) == (stdout_from, stderr_from)


@given(strategies.outcomes)
def test_an_outcome_comes_back_as_it_was(outcome: Outcome) -> None:
    assert parse_outcome(encode_outcome(outcome)) == outcome


@given(strategies.attachments)
def test_an_attachment_comes_back_as_it_was(attachment: Attachment) -> None:
    assert parse_attachment(attachment.encode()) == attachment


def read_in_pieces(reader: RecordReader[object], data: bytes, sizes: list[int]) -> list[object]:
    got: list[object] = []
    for size in [*sizes, len(data)]:
        got += reader.feed(data[:size])
        data = data[size:]
    reader.finish()
    return got


@given(st.lists(strategies.entries, max_size=5), cuts)
def test_entries_survive_any_split(entries: list[Entry], sizes: list[int]) -> None:
    assert read_in_pieces(RecordReader(parse_entry), b"".join(map(encode_entry, entries)), sizes) == entries


@given(st.lists(strategies.events, max_size=5), cuts)
def test_events_survive_any_split(events: list[WatchEvent], sizes: list[int]) -> None:
    assert read_in_pieces(RecordReader(parse_event), b"".join(map(encode_event, events)), sizes) == events


@given(st.lists(strategies.commands, max_size=5), cuts)
def test_commands_survive_any_split(commands: list[CommandInfo], sizes: list[int]) -> None:
    assert read_in_pieces(RecordReader(parse_command), b"".join(map(encode_command, commands)), sizes) == commands


@pytest.mark.parametrize("parse", [parse_entry, parse_event, parse_command])
@given(pieces=st.lists(st.binary(max_size=100), max_size=10))
def test_random_records_are_refused_and_never_hoarded(parse: Callable[[bytes], object], pieces: list[bytes]) -> None:
    reader = RecordReader(parse)
    try:
        for piece in pieces:
            reader.feed(piece)
            assert reader.buffered < 4 + MAX_RECORD
        reader.finish()
    except ProtocolViolation:
        pass


@pytest.mark.parametrize("parse", [parse_outcome, parse_attachment, parse_only_entry, parse_count, parse_stage])
@given(payload=st.binary(max_size=100))
def test_random_payloads_are_refused_or_read(parse: Callable[[bytes], object], payload: bytes) -> None:
    try:
        parse(payload)
    except ProtocolViolation:
        pass


def test_an_oversize_record_is_refused_with_its_length() -> None:
    reader = RecordReader(parse_entry)
    with pytest.raises(ProtocolViolation):
        reader.feed(struct.pack("<I", MAX_RECORD + 1))
    assert reader.buffered == 0


def test_a_stream_that_ends_within_a_record_is_refused() -> None:
    reader = RecordReader(parse_event)
    reader.feed(b"\x0c")
    with pytest.raises(ProtocolViolation):
        reader.finish()


FILE = Entry(b"name", FileType.FILE, 0o644, 0, 0, 1, 1)


def test_impossible_entries_are_refused() -> None:
    good = encode_entry(FILE)[4:]
    assert parse_entry(good) == FILE
    for bad in (
        b"x" + good[1:],  # no such type
        good[:1] + b"\1" + good[2:],  # a file that could not be entered
        good[:1] + b"\2" + good[2:],  # no such flag
        good[:2] + b"\1" + good[3:],  # reserved
        good[:4] + struct.pack("<I", 0o100644) + good[8:],  # the type in the mode
        good + b"x",
        good[:-1],
        good[:-1] + b"\0",
        encode_entry(dataclasses.replace(FILE, target=b"t"))[4:],  # of a file
        encode_entry(dataclasses.replace(FILE, name=bytes(MAX_NAME + 1)))[4:],
    ):
        with pytest.raises(ProtocolViolation):
            parse_entry(bad)


def test_stat_has_no_name() -> None:
    nameless = dataclasses.replace(FILE, name=b"")
    assert parse_only_entry(encode_entry(nameless)) == nameless
    for bad in (encode_entry(FILE), encode_entry(nameless) + b"x", b"", encode_record(b"")):
        with pytest.raises(ProtocolViolation):
            parse_only_entry(bad)


@pytest.mark.parametrize(
    ("how", "cause", "value"),
    [(0, 0, 0), (3, 0, 0), (1, 3, 0), (1, 0, 256), (2, 0, 0), (2, 0, 65), (1, 0, 2**32 - 1)],
)
def test_impossible_ends_are_refused(how: int, cause: int, value: int) -> None:
    good = encode_outcome(Outcome(0, None, Cause.ITSELF, 0, 0, 0, 0, 0, 0))
    with pytest.raises(ProtocolViolation):
        parse_outcome(struct.pack("<BBHI", how, cause, 0, value) + good[8:])


def test_a_stage_is_one_of_ours() -> None:
    assert parse_stage(struct.pack("<I", 5)) is Stage.CWD
    for bad in (b"", struct.pack("<I", 0), struct.pack("<I", 7), bytes(5)):
        with pytest.raises(ProtocolViolation):
            parse_stage(bad)


# What we would say wrongly is refused before it is said, by the field's name.

GOOD = ExecSpec.of("true")
BAD_SPECS = [
    ("argv is empty", ExecSpec(argv=())),
    ("argv\\[1\\] contains a NUL", ExecSpec(argv=(b"a", b"b\0"))),
    ("cwd contains a NUL", dataclasses.replace(GOOD, cwd=b"/\0")),
    ("cwd is empty", dataclasses.replace(GOOD, cwd=b"")),
    ("env has the name", dataclasses.replace(GOOD, env=((b"", b"x"),))),
    ("env has the name", dataclasses.replace(GOOD, env=((b"A=B", b"x"),))),
    ("env\\[b'A'\\] contains a NUL", dataclasses.replace(GOOD, env=((b"A", b"\0"),))),
    ("argv and env take", ExecSpec(argv=(b"a", bytes([1]) * MAX_REQUEST))),
    ("timeout", dataclasses.replace(GOOD, timeout=0.0)),
    ("timeout", dataclasses.replace(GOOD, timeout=-1.0)),
    ("timeout", dataclasses.replace(GOOD, timeout=float("nan"))),
    ("timeout", dataclasses.replace(GOOD, timeout=2.0**32)),
    ("grace", dataclasses.replace(GOOD, grace=float("inf"))),
    ("drain", dataclasses.replace(GOOD, drain=-0.1)),
    ("window", dataclasses.replace(GOOD, window=1)),
    ("window", dataclasses.replace(GOOD, window=2**20 + 1)),
    ("umask", dataclasses.replace(GOOD, umask=0o1000)),
    ("identity.uid", dataclasses.replace(GOOD, identity=Identity(uid=2**32 - 1))),
    ("identity.gid", dataclasses.replace(GOOD, identity=Identity(gid=-1))),
    ("identity.groups", dataclasses.replace(GOOD, identity=Identity(groups=(2**32,)))),
    ("terminal.rows", dataclasses.replace(GOOD, terminal=TerminalSize(65536, 1))),
    ("terminal.columns", dataclasses.replace(GOOD, terminal=TerminalSize(1, -1))),
    ("rlimits.soft", dataclasses.replace(GOOD, rlimits=(Rlimit(1, -1, 1),))),
]


@pytest.mark.parametrize(("field", "spec"), BAD_SPECS, ids=[str(number) for number in range(len(BAD_SPECS))])
def test_a_bad_spec_is_refused_by_its_field(field: str, spec: ExecSpec) -> None:
    with pytest.raises(ValueError, match=field):
        encode_exec(spec)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("path contains a NUL", FileRequest(FrameType.STAT, b"\0")),
        ("target contains a NUL", FileRequest(FrameType.MOVE, b"a", b"\0")),
        ("path is 70000 bytes", FileRequest(FrameType.STAT, b"a" * 70_000)),
        ("mode", FileRequest(FrameType.CHMOD, b"a", mode=0o10000)),
        ("offset", FileRequest(FrameType.READ, b"a", offset=-1)),
        ("length", FileRequest(FrameType.READ, b"a", length=2**64)),
        ("identity.groups", FileRequest(FrameType.READ, b"a", identity=Identity(1, 1, (2,)))),
    ],
)
def test_a_bad_file_request_is_refused_by_its_field(field: str, request_: FileRequest) -> None:
    with pytest.raises(ValueError, match=field):
        request_.encode()


def test_times_are_rounded_up_and_never_to_none() -> None:
    assert milliseconds("timeout", 0.0001) == 1
    assert milliseconds("timeout", 0.3) == 300
    assert milliseconds("timeout", 1.2345) == 1235


def test_windows_are_rounded_up_as_the_agent_does() -> None:
    assert effective_window(16384) == 16384
    assert effective_window(16385) == 20480


def test_a_spec_in_strings_is_the_same_in_bytes() -> None:
    assert ExecSpec.of("printf", b"\xff", "\udcff", env={"A": "ä"}, cwd="/tmp", timeout=1.5) == ExecSpec(
        argv=(b"printf", b"\xff", b"\xff"), env=((b"A", "ä".encode()),), cwd=b"/tmp", timeout=1.5
    )
