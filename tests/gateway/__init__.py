"""gRPC has to be told a few things before it is imported, and this is imported first."""

from k8e.doors.grpc.gateway import prepare_environment

prepare_environment()
