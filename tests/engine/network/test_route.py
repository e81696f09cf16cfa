"""The kernel's refusals are reported; what it does is shown by the wires of test_network.py."""

from __future__ import annotations

import errno
import os

import pytest

from k8e.engine.local.network.netlink.messages import Message, NetlinkError
from k8e.engine.local.network.netlink.route import RouteSocket, remove_link, set_up

NOBODY = 2_000_000_000  # no machine has had so many interfaces


def test_an_interface_that_is_not_there() -> None:
    with RouteSocket() as kernel, pytest.raises(OSError, match="No such device") as caught:
        kernel.index_of("k8e-no-such")
    assert caught.value.errno == errno.ENODEV


def test_the_first_loopback_has_the_index_that_wires_rely_on() -> None:
    with RouteSocket() as kernel:
        assert kernel.index_of("lo") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="changing interfaces needs root")
@pytest.mark.parametrize("requests", [[set_up(NOBODY)], [set_up(1), set_up(NOBODY)], [remove_link(NOBODY), set_up(1)]])
def test_of_several_the_one_that_failed_is_said(requests: list[Message]) -> None:
    with RouteSocket() as kernel:
        with pytest.raises(NetlinkError) as caught:
            kernel.request(*requests)
        assert caught.value.errno == errno.ENODEV
        kernel.request(set_up(1))  # and the next answer is the next one's
