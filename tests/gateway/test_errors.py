"""Faults on the wire: the right status, and details that fit."""

from __future__ import annotations

import grpc
import pytest

from k8e.cli.remote.connection import read_error
from k8e.core.errors import Fault, Kind
from k8e.core.model import Denial, Denials
from k8e.doors.grpc.errors import CODES, describe
from k8e.doors.http import errors as http_problems


def test_every_kind_has_a_status() -> None:
    assert set(CODES) == set(Kind)
    assert grpc.StatusCode.INTERNAL not in CODES.values()
    assert grpc.StatusCode.UNKNOWN not in CODES.values()


@pytest.mark.parametrize("text", ["short", "x" * 10_000, "\U0001f600" * 5000, "\udcff" * 3000])
def test_details_fit_into_a_trailer(text: str) -> None:
    entries = tuple(Denial(f"host{number}.example", "192.0.2.1", 443, "name", text[:100], 1.0) for number in range(100))
    fault = Fault(
        Kind.FAILED, "code", text, detail=text, hint=text, field=text, retry_after=1.5, denied=Denials(entries, 7)
    )
    status, detail = describe(fault)
    assert status is grpc.StatusCode.ABORTED
    message = detail.error.encode()
    assert detail.ByteSize() * 4 / 3 + len(message) * 3 < 8000
    assert len(detail.denied) + detail.denied_more == 107
    assert (detail.code, detail.retry_after) == ("code", 1.5)


def test_the_command_line_says_the_same_about_it_here_and_there() -> None:
    denied = Denials((Denial("a.example", "", 0, "name", "ask", 1.0),), 2)
    fault = Fault(Kind.INVALID, "code", "error", detail="why", hint="do", field="path", retry_after=2.5, denied=denied)
    _, body = http_problems.describe(fault)
    _, detail = describe(fault)
    assert read_error(detail).body == body
