"""Names for sandboxes. Those on a sandbox's list are asked for upstream, their addresses are filtered, made known to
the kernel and only then answered; all others never leave the machine and are refused at once.

    resolv_conf   whom to ask                          queries     what a sandbox sends
    upstream      asking them; cache: remembering      answers     what upstream sends, what a sandbox gets
    allowance     how much a sandbox may ask           verdicts    what becomes of a question
    listeners     its sockets                          dialogue    one question from packet to packet
    server        all of it together
"""

from k8e.engine.local.dns.allowance import Pace
from k8e.engine.local.dns.resolv_conf import ResolvConf, Server, resolv_conf_for_sandbox
from k8e.engine.local.dns.server import Admit, NameServer, Refused
from k8e.engine.local.dns.upstream import Upstream, UpstreamFailed

__all__ = [
    "Admit",
    "NameServer",
    "Pace",
    "Refused",
    "ResolvConf",
    "Server",
    "Upstream",
    "UpstreamFailed",
    "resolv_conf_for_sandbox",
]
