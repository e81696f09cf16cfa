"""The gateway: `sandbox.v1.SandboxService` (proto/) over gRPC and TLS. docs/gateway.md describes it.

Nothing here may be imported on a path that somebody waits for: grpc alone takes longer than a command does.
"""
