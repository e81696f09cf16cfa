"""`k8e image`: what sandboxes can be made of. JSON on stdout; how far it is on stderr, a bar where somebody looks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from k8e.cli.client.failures import lost, parse_answer
from k8e.cli.client.http import BYTES, JSON, Client, open_client, quote
from k8e.cli.client.response import Response, read_object
from k8e.cli.credentials import find_credentials
from k8e.cli.process import FAILED, Failure, read_some, write_all
from k8e.cli.sessions import finish, print_json
from k8e.engine.reference import InvalidReference, parse_reference

RESULT, ERROR, PROGRESS = 5, 6, 7  # kinds of frames
PIECE = 1 << 20
WIDTH = 30
BASE = "k8e/base"


class Meter:
    """Shows how far it is."""

    def __init__(self, title: str, descriptor: int = 2) -> None:
        self._title = title
        self._descriptor = descriptor
        self._bar = os.isatty(descriptor)
        self._step = ""
        self._at = 0.0

    def show(self, progress: dict[str, Any]) -> None:
        step, done, total = str(progress["step"]), int(progress["done"]), int(progress["total"])
        if not self._bar:
            if step != self._step:
                self._write(f"{self._title}: {step}{f' {size(total)}' if total else ''}\n")
            self._step = step
            return
        now = time.monotonic()
        if step == self._step and now - self._at < 0.1 and done < total:
            return
        self._step, self._at = step, now
        filled = WIDTH * min(done, total) // total if total else 0
        bar = f"[{'#' * filled}{' ' * (WIDTH - filled)}] {size(done)} of {size(total)}" if total else "..."
        self._write(f"\r\033[K{self._title}: {step} {bar}")

    def clear(self) -> None:
        if self._bar and self._step:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        write_all(self._descriptor, text.encode())


def size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def open_daemon() -> Client:
    """For everything but looking."""
    client = open_client()
    if not isinstance(client, Client):
        hint = "run this on the machine of the gateway (with --tenant for a tenant of its); `k8e image list` works here"
        raise Failure("not_over_a_gateway", "images are got on the machine that is to have them", hint=hint)
    return client


def follow(response: Response, meter: Meter) -> dict[str, Any]:
    """To the result; a Failure when it comes to none."""
    if response.status >= 300:
        raise Failure.of(read_object(response))
    result: dict[str, Any] | None = None
    try:
        for kind, data in response.frames():
            if kind == PROGRESS:
                meter.show(parse_answer(data))
            elif kind == ERROR:
                raise Failure.of(parse_answer(data))
            elif kind == RESULT:
                result = parse_answer(data)
    finally:
        meter.clear()
    if result is None:
        raise lost()
    return result


def pull_image(client: Client, name: str, meter: Meter, tenant: str = "") -> dict[str, Any]:
    wanted: dict[str, Any] = {"image": name, "tenant_id": tenant}
    try:
        reference = parse_reference(name)
    except InvalidReference:
        pass  # which the daemon explains
    else:
        if credentials := find_credentials(reference.host, reference.path):
            wanted["credentials"] = credentials
    return follow(client.request("POST", "/v1/images/pull", json.dumps(wanted).encode(), JSON), meter)


# Commands


def pull(options: argparse.Namespace) -> int:
    print_json(pull_image(open_daemon(), options.name, Meter(options.name), options.tenant))
    return 0


def add(options: argparse.Namespace) -> int:
    client = open_daemon()
    query = f"?name={quote(options.image)}&tenant_id={quote(options.tenant)}"
    meter = Meter(options.image or options.file)
    response = client.send("POST", f"/v1/images/import{query}", read_archive(options.file), BYTES)
    print_json(follow(response, meter))
    return 0


def build_base(options: argparse.Namespace) -> int:
    print_json(follow(open_daemon().request("POST", "/v1/images/base", b"{}", JSON), Meter(BASE)))
    return 0


def list_images(options: argparse.Namespace) -> int:
    return finish(open_client().request("GET", "/v1/images"))


def remove(options: argparse.Namespace) -> int:
    return finish(
        open_daemon().request("DELETE", f"/v1/images?name={quote(options.name)}&tenant_id={quote(options.tenant)}")
    )


def prune(options: argparse.Namespace) -> int:
    wanted = {"unused_for": options.unused_for, "tenant_id": options.tenant}
    return finish(open_daemon().request("POST", "/v1/images/prune", json.dumps(wanted).encode(), JSON))


def read_archive(place: str) -> Iterator[bytes]:
    """A file, standard input (-), or a directory with an OCI layout."""
    if place == "-":
        return iter(lambda: read_some(0), b"")
    if os.path.isdir(place):
        return pack_directory(place)
    try:
        return read_file(os.open(place, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise Failure("archive_unreadable", "the archive cannot be read", detail=str(error), status=FAILED) from error


def read_file(descriptor: int) -> Iterator[bytes]:
    try:
        while piece := os.read(descriptor, PIECE):
            yield piece
    finally:
        os.close(descriptor)


def pack_directory(place: str) -> Iterator[bytes]:
    """As a tar, without a copy of it on disk."""
    import subprocess

    command = ["tar", "-C", place, "-cf", "-", "--sort=name", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr.fileno()) as process:
        assert process.stdout is not None
        while piece := process.stdout.read(PIECE):
            yield piece
    if process.returncode != 0:
        raise Failure("archive_unreadable", "the directory cannot be read to its end")
