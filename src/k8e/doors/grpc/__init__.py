"""The gateway: `sandbox.v1.SandboxService` (proto/) over gRPC and TLS. docs/gateway.md describes it.

A command line imports nothing of it before it needs it: grpc alone takes longer than a command.
"""
