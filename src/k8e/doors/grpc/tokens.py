"""Tokens of the cluster's service accounts, in the metadata of a call: `authorization: Bearer TOKEN`."""

from __future__ import annotations

from typing import Final

from k8e.core.access.keys import Admission, Keys
from k8e.core.errors import Fault, Kind
from k8e.doors.grpc.call import Context

AUTHORIZATION: Final = "authorization"
_KEY_PREFIX: Final = "k8e_"


def find_token(context: Context) -> str | None:
    """None: the caller sends none. What is no token is for the check to refuse."""
    sent = [str(value) for name, value in context.invocation_metadata() or () if name == AUTHORIZATION]
    if not sent:
        return None
    kind, _, token = sent[0].partition(" ")
    return token.strip() if len(sent) == 1 and kind.lower() == "bearer" else ""


async def admit_token(keys: Keys, token: str, admitted: Admission | Fault, source: str) -> Admission | Fault:
    """A Fault says why the caller is not authenticated. `admitted`: who the caller is by its certificate."""
    if isinstance(admitted, Admission):
        error = "there is a token, and a certificate too"
        hint = "Send the token with the anonymous certificate, or leave it out."
        return Fault(Kind.UNAUTHENTICATED, "credential_ambiguous", error, hint=hint)
    if token.startswith(_KEY_PREFIX):
        error = "an API key is not sent to the gateway"
        return Fault(Kind.UNAUTHENTICATED, "token_refused", error, hint="Log in with it: k8e connect.")
    try:
        return await keys.admit_token(token, source)
    except Fault as fault:
        return fault
