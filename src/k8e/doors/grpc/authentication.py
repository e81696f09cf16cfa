"""Who calls over gRPC: the client certificate of the connection, and the tenant and owner that the metadata name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc.aio

from k8e.core.access.keys import Admission, Keys
from k8e.core.errors import Fault
from k8e.doors.grpc.methods import OWNER_KEY, TENANT_KEY
from k8e.doors.requests import read_meant

Context = grpc.aio.ServicerContext[Any, Any]


def authenticate(keys: Keys, context: Context) -> Admission | Fault:
    """A Fault says why the caller is not authenticated."""
    certificate = next(iter(context.auth_context().get("x509_pem_cert") or ()), b"")
    try:
        return keys.admit(certificate)
    except Fault as fault:
        return fault


def set_meant(admission: Admission, context: Context) -> Admission:
    """Adds the tenant and the owner whose sessions the call is about, where its metadata name them."""
    metadata = context.invocation_metadata() or ()
    named = {name: str(value) for name, value in metadata if name in (TENANT_KEY, OWNER_KEY)}
    if not named:
        return admission
    meant = read_meant(named.get(TENANT_KEY, ""), named.get(OWNER_KEY, ""))
    return replace(admission, caller=replace(admission.caller, meant=meant))
