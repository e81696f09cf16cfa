"""The host's side of an agent: `AgentLink` over whatever a dialer connects to. What it takes and gives is in `model`,
what can go wrong in `errors`."""

from k8e.link.client import AgentLink
from k8e.link.dial import Dialer, SocketDialer, UnixDialer
from k8e.link.switchboard import Timing

__all__ = ["AgentLink", "Dialer", "SocketDialer", "Timing", "UnixDialer"]
