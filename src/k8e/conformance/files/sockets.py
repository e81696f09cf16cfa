"""Byte streams to sockets inside the sandbox."""

from __future__ import annotations

import asyncio

from k8e.conformance.counters import CounterStream, counters
from k8e.conformance.registry import check
from k8e.conformance.subject import Subject, equal, finish, holds, python, read_through, refused, run, together
from k8e.link.errors import Code, LinkError
from k8e.link.model import Connection, Process

# Arguments: tcp, tcp6 or a path. Prints the port; then each connection is served by a process of its own.
SERVER = """
import os, socket, sys
where = sys.argv[1]
if where == "tcp":
    server = socket.create_server(("127.0.0.1", 0))
elif where == "tcp6":
    server = socket.create_server(("::1", 0), family=socket.AF_INET6)
else:
    server = socket.socket(socket.AF_UNIX)
    server.bind(where)
    server.listen()
print(server.getsockname()[1] if where.startswith("tcp") else 0, flush=True)
while True:
    connection = server.accept()[0]
    if os.fork() == 0:
        serve(connection)
        os._exit(0)
    connection.close()
"""
ECHO = """
def serve(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.sendall(b"end")
"""
MUTE = """
def serve(connection):
    input()
"""
SPEAKS_FIRST = """
def serve(connection):
    connection.sendall(b"x" * 1000000)
"""


async def serve(subject: Subject, behaviour: str, where: str) -> tuple[Process, int]:
    process = await subject.sandbox.start(python(subject, behaviour + SERVER, where))
    line = await read_through(process.stdout, b"\n")
    if not line:
        raise AssertionError(f"the server did not start: {(await finish(process)).stderr!r}")
    return process, int(line)


async def stop(process: Process) -> None:
    await process.end(grace=0.2)
    await finish(process)


async def read_rest(connection: Connection) -> bytes:
    chunks = []
    while chunk := await connection.read():
        chunks.append(chunk)
    return b"".join(chunks)


async def echoes(connection: Connection) -> None:
    await connection.write(bytes(range(256)))
    got = b""
    while len(got) < 256:
        got += await connection.read()
    equal("echo", got, bytes(range(256)))
    # Half closed: the other direction still works.
    await connection.close_write()
    equal("after half close", await read_rest(connection), b"end")
    await connection.close()


@check()
async def check_connect_to_a_tcp_port(subject: Subject) -> None:
    server, port = await serve(subject, ECHO, "tcp")
    for _ in range(3):
        await echoes(await subject.sandbox.connect(port=port))
    await stop(server)


@check()
async def check_connect_to_a_port_on_ipv6_only(subject: Subject) -> None:
    server, port = await serve(subject, ECHO, "tcp6")
    await echoes(await subject.sandbox.connect(port=port))
    await stop(server)


@check()
async def check_connect_to_a_unix_socket(subject: Subject) -> None:
    server, _ = await serve(subject, ECHO, "socket")
    await echoes(await subject.sandbox.connect(path=subject.inside(b"socket"), identity=subject.user))
    await stop(server)
    attempt = subject.sandbox.connect(path=subject.inside(b"socket"), identity=subject.user)
    await refused("connect to a socket without a listener", attempt, Code.REFUSED)


@check()
async def check_connect_to_nothing_is_refused(subject: Subject) -> None:
    server, port = await serve(subject, ECHO, "tcp")
    await stop(server)
    await refused("connect to a closed port", subject.sandbox.connect(port=port), Code.REFUSED)
    await refused("connect to nothing", subject.sandbox.connect(path=subject.inside(b"absent")), Code.NOT_FOUND)
    path = subject.inside(b"file")
    await subject.sandbox.write_file(path, b"x", mode=0o666)
    await refused("connect to a file", subject.sandbox.connect(path=path), Code.REFUSED)


@check()
async def check_connection_denied_to_others(subject: Subject) -> None:
    server, _ = await serve(subject, "import os; os.umask(0o077)" + ECHO, "socket")
    path = subject.inside(b"socket")
    stranger = type(subject.user)(uid=54_321, gid=54_321)
    await refused("connect", subject.sandbox.connect(path=path, identity=stranger), Code.DENIED)
    await stop(server)


@check()
async def check_connection_carries_much_both_ways(subject: Subject) -> None:
    total = subject.bulk // 8
    server, port = await serve(subject, ECHO.replace('b"end"', 'b""'), "tcp")
    connection = await subject.sandbox.connect(port=port)

    async def write() -> None:
        for start in range(0, total, 1 << 18):
            await connection.write(counters(start, min(start + (1 << 18), total)))
        await connection.close_write()

    writer = asyncio.create_task(write())
    stream = CounterStream()
    while chunk := await connection.read():
        stream.take(chunk)
    await writer
    stream.complete("echo", total)
    await connection.close()
    await stop(server)


@check()
async def check_server_that_speaks_and_hangs_up(subject: Subject) -> None:
    server, port = await serve(subject, SPEAKS_FIRST, "tcp")
    connection = await subject.sandbox.connect(port=port)
    equal("length", len(await read_rest(connection)), 1_000_000)
    await connection.close()
    await stop(server)


@check()
async def check_server_that_never_reads_blocks_its_writer_only(subject: Subject) -> None:
    server, port = await serve(subject, MUTE, "tcp")
    connection = await subject.sandbox.connect(port=port)
    written = 0

    async def flood() -> None:
        nonlocal written
        while True:
            await connection.write(b"x" * 65536)
            written += 65536

    writer = asyncio.create_task(flood())
    for _ in range(10):
        equal("another command", (await run(subject, "echo", "alive")).stdout, b"alive\n")
    holds("writer is waiting", not writer.done(), writer)
    await stop(server)
    (result,) = await asyncio.gather(writer, return_exceptions=True)
    holds("the writer is told that the reader is gone", isinstance(result, LinkError), result)
    holds("flow control held the writer", written < 64 << 20, written)
    await connection.close()


@check()
async def check_many_connections_at_once(subject: Subject) -> None:
    server, port = await serve(subject, ECHO, "tcp")

    async def one() -> None:
        await echoes(await subject.sandbox.connect(port=port))

    await together(*(one() for _ in range(40)))
    await stop(server)


@check()
async def check_closed_connection_is_closed_inside(subject: Subject) -> None:
    tell = ECHO.replace('connection.sendall(b"end")', 'print("closed", flush=True)')
    server, port = await serve(subject, tell, "tcp")
    connection = await subject.sandbox.connect(port=port)
    await connection.write(b"x")
    equal("echo", await connection.read(), b"x")
    await connection.close()
    equal("the server's word", await read_through(server.stdout, b"\n"), b"closed\n")
    await stop(server)
