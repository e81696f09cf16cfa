"""The command line at a gateway on another machine. Imported only when a gateway is meant: gRPC alone takes longer to
import than a local command runs."""

from __future__ import annotations

import os

# Before gRPC is imported: it would write messages of its own to stderr, and its fork handlers can hang.
os.environ["GRPC_VERBOSITY"] = "NONE"
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
