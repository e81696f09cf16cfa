"""`k8e image`: images of sandboxes. The result is JSON on stdout; progress goes to stderr, as a bar on a terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

from k8e.cli.client import Answer, LocalClient, open_client
from k8e.cli.images.credentials import find_credentials
from k8e.cli.process import FAILED, Failure, read_some, write_all
from k8e.cli.view import show
from k8e.cli.view.table import show_size
from k8e.engine.reference import InvalidReference, parse_reference

PIECE = 1 << 20
WIDTH = 30
BASE = "k8e/base"


class Meter:
    """Shows progress, until its context ends."""

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
                self._write(f"{self._title}: {step}{f' {show_size(total)}' if total else ''}\n")
            self._step = step
            return
        now = time.monotonic()
        if step == self._step and now - self._at < 0.1 and done < total:
            return
        self._step, self._at = step, now
        filled = WIDTH * min(done, total) // total if total else 0
        bar = f"[{'#' * filled}{' ' * (WIDTH - filled)}] {show_size(done)} of {show_size(total)}" if total else "..."
        self._write(f"\r\033[K{self._title}: {step} {bar}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar and self._step:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        write_all(self._descriptor, text.encode())


def open_daemon() -> LocalClient:
    """For everything but `list`, which a gateway answers too."""
    client = open_client()
    if not isinstance(client, LocalClient):
        hint = "run this on the machine of the gateway (with --tenant for a tenant of its); `k8e image list` works here"
        raise Failure("not_over_a_gateway", "images are got on the machine that is to have them", hint=hint)
    return client


def pull_image(client: LocalClient, name: str, meter: Meter, tenant: str = "") -> Answer:
    wanted: dict[str, Any] = {"image": name, "tenant_id": tenant}
    try:
        reference = parse_reference(name)
    except InvalidReference:
        pass  # which the daemon explains
    else:
        if credentials := find_credentials(reference.host, reference.path):
            wanted["credentials"] = credentials
    with meter:
        return client.pull_image(wanted, meter.show)


def pull(options: argparse.Namespace) -> int:
    return show(pull_image(open_daemon(), options.name, Meter(options.name), options.tenant))


def import_image(options: argparse.Namespace) -> int:
    client = open_daemon()
    with Meter(options.name or options.file) as meter:
        answer = client.import_image(options.name, options.tenant, read_archive(options.file), meter.show)
    return show(answer)


def build_base(options: argparse.Namespace) -> int:
    with Meter(BASE) as meter:
        answer = open_daemon().build_base(meter.show)
    return show(answer)


def build_guest(options: argparse.Namespace) -> int:
    """Without the daemon: it finds the guest when the next one starts."""
    from k8e.daemon.guest import build

    return show(Answer(json.dumps(build(options.without, check=options.check)).encode() + b"\n"))


def list_images(options: argparse.Namespace) -> int:
    return show(open_client().list_images(), "images")


def remove(options: argparse.Namespace) -> int:
    return show(open_daemon().remove_image(options.name, options.tenant))


def prune(options: argparse.Namespace) -> int:
    return show(open_daemon().prune_images(options.unused_for, options.tenant))


def read_archive(place: str) -> Iterator[bytes]:
    """Reads a file, standard input (-), or a directory with an OCI layout."""
    if place == "-":
        return iter(lambda: read_some(0), b"")
    if os.path.isdir(place):
        return pack_directory(place)
    try:
        return read_file(os.open(place, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        hint = "name a file of `docker save`, a directory with an OCI layout, or - for standard input"
        raise Failure(
            "archive_unreadable", "the archive cannot be read", detail=str(error), hint=hint, status=FAILED
        ) from error


def read_file(descriptor: int) -> Iterator[bytes]:
    try:
        while piece := os.read(descriptor, PIECE):
            yield piece
    finally:
        os.close(descriptor)


def pack_directory(place: str) -> Iterator[bytes]:
    """Packs the directory as a tar, without a copy of it on disk."""
    import subprocess

    command = ["tar", "-C", place, "-cf", "-", "--sort=name", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr.fileno()) as process:
        assert process.stdout is not None
        while piece := process.stdout.read(PIECE):
            yield piece
    if process.returncode != 0:
        raise Failure("archive_unreadable", "the directory cannot be read to its end", hint="tar has said why")
