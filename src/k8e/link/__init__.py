"""The host's side of the agent protocol: `AgentLink`, over the socket that a dialer connects. `model` has its data,
`errors` its errors."""

from k8e.link.client import AgentLink
from k8e.link.dial import Dialer, SocketDialer, UnixDialer
from k8e.link.multiplexer import Timing

__all__ = ["AgentLink", "Dialer", "SocketDialer", "Timing", "UnixDialer"]
