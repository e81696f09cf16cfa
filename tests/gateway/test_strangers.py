"""Strangers at the gateway's port: together they get a little, and take nothing from those who are known."""

from __future__ import annotations

import json
from typing import Any

import grpc

from k8e.core.refusal_log import BURST, NAME
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.sources import name_source
from tests.cli.machine import wait_until
from tests.gateway.house import House, open_house


def test_addresses_of_one_subscriber_are_one_source() -> None:
    assert name_source("2001:db8:1:2:3:4:5:6") == name_source("2001:db8:1:2::9") == "2001:db8:1:2::/64"
    assert name_source("2001:db8:1:3::9") != name_source("2001:db8:1:2::9")
    assert name_source("::ffff:192.0.2.1") == name_source("192.0.2.1") == "192.0.2.1"
    assert (name_source("::1"), name_source("fe80::1%eth0")) == ("::1", "fe80::/64")


def read_log(house: House, name: str) -> list[dict[str, Any]]:
    files = (house.machine.folder / "s").glob(f"{name}*")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_calls_of_nobody_do_not_push_out_what_people_did() -> None:
    with open_house('[audit]\nsize = "64k"\nfiles = 1\n') as house:
        tenant, nobody = house.tenant("acme"), house.nobody()
        session = tenant.create()
        for _ in range(5 * BURST):
            code, detail = nobody.refused("Status", pb.StatusRequest())
            assert (code, detail and detail.code) == (grpc.StatusCode.UNAUTHENTICATED, "not_logged_in")
        tenant.run(session, "true")
        wait_until(lambda: any(line["event"] == "run_ended" for line in read_log(house, "audit.log")))
        events = [line["event"] for line in read_log(house, "audit.log")]
        assert {"daemon_started", "key_created", "session_created", "run_started", "run_ended"} <= set(events)
        assert "access_refused" not in events
        refused = [line for line in read_log(house, NAME) if line["event"] == "access_refused"]
        assert BURST <= len(refused) < 2 * BURST
        assert {(line["caller"], line["source"], line["code"]) for line in refused} == {
            ("nobody", "127.0.0.1", "not_logged_in")
        }
        assert (house.machine.folder / "s" / "daemon.log").read_text().count("caller=nobody") < 10
