"""Every method with every caller that may not call it, or not for this session."""

from __future__ import annotations

import time
from collections.abc import Sequence

import grpc
import pytest
from google.protobuf.message import Message

from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.doors.grpc.methods import METHODS
from k8e.identity import anonymous
from k8e.identity.authority import Authority, make_request, read_request
from tests.cli.machine import wait_until
from tests.gateway.house import Guest, House

UNAUTHENTICATED, UNAVAILABLE = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE

# By what they name.
OF_SESSIONS = ["GetSession", "DestroySession", "StopSession", "StartSession", "UpdateAllowedHosts", "Ps", "Log"]
OF_SESSIONS += ["Exec", "ExecStream", "ExecInteractive", "OpenTerminal", "PipInstall"]
OF_SESSIONS += ["WriteFile", "ReadFile", "UploadFile", "DownloadFile", "ListFiles", "GetTree"]
OF_SESSIONS += ["MakeDirectory", "RemoveFile"]
OF_RUNS = ["PollRun", "KillRun"]
OF_ADMINS = ["CreateApiKey", "ListApiKeys", "DeleteApiKey"]
OF_OPERATORS = ["ApproveAction"]
OF_SESSIONS += ["ConfirmAction"]
OF_SESSIONS += ["RunSubAgent"]
OF_ALL = ["CreateSession", "ListSessions", "ListApprovals", "ListImages", "Status", "ConnectAgent"]


def test_no_method_is_forgotten() -> None:
    assert {*OF_SESSIONS, *OF_RUNS, *OF_ADMINS, *OF_OPERATORS, *OF_ALL, "Login"} == set(METHODS)


def ask(method: str, name: str = "sess-1") -> Sequence[Message]:
    """A request that is answered where the caller may send it."""
    execution = pb.ExecRequest(session_id=name, command="true")
    upload = pb.UploadHeader(session_id=name, path="x")
    special: dict[str, Sequence[Message]] = {
        "Exec": [execution],
        "ExecStream": [execution],
        "ExecInteractive": [pb.ExecInput(start=execution)],
        "OpenTerminal": [pb.OpenTerminalRequest(options=pb.TerminalOptions(session_id=name, command="true"))],
        "UploadFile": [pb.UploadFileRequest(header=upload), pb.UploadFileRequest(content=b"x")],
        "ConfirmAction": [pb.ConfirmActionRequest(session_id=name, action="x")],
        "ApproveAction": [pb.ApproveActionRequest(approval_id="appr-0000000000000000", approved=True)],
        "PipInstall": [pb.PipInstallRequest(session_id=name, packages=["x"])],
        "UpdateAllowedHosts": [pb.UpdateAllowedHostsRequest(session_id=name, clear=True)],
        "CreateApiKey": [pb.CreateApiKeyRequest(name="mine", scope="admin")],
        "DeleteApiKey": [pb.DeleteApiKeyRequest(name="acme")],
        "ConnectAgent": [pb.ConnectAgentRequest(options=pb.AgentOptions())],
        "Login": [pb.LoginRequest(csr=make_request()[1])],
        "ListFiles": [pb.ListFilesRequest(session_id=name)],
        "WriteFile": [pb.WriteFileRequest(session_id=name, path="x", content=b"x")],
    }
    if method in special:
        return special[method]
    request = METHODS[method].request()
    for field in ("session_id", "run_id", "parent_session_id"):
        if field in request.DESCRIPTOR.fields_by_name and method not in OF_ALL:
            setattr(request, field, name)
    if "path" in request.DESCRIPTOR.fields_by_name:
        setattr(request, "path", "x")  # noqa: B010 - which kind of message it is, is not known here
    return [request]


@pytest.fixture(scope="module")
def acme(house: House) -> Guest:
    return house.tenant("acme")


@pytest.fixture(scope="module")
def session(acme: Guest) -> str:
    session = acme.create()
    acme.call("WriteFile", pb.WriteFileRequest(session_id=session, path="x", content=b"secret"))
    return session


@pytest.fixture(scope="module")
def run(acme: Guest, session: str) -> str:
    return acme.run(session, "sleep 600", background=True, timeout=600).run_id


@pytest.fixture(scope="module")
def rival(house: House) -> Guest:
    return house.tenant("rival")


def own(house: House, authority: Authority) -> Guest:
    """A client with a certificate of that authority, in the name of root."""
    key, request = make_request()
    certificate = authority.issue_client(request, "k8e:uid:0", time.time(), time.time() + 600)
    return house.meet(key, certificate)


@pytest.fixture(scope="module")
def refused(house: House, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Guest, grpc.StatusCode, str]]:
    """Who they are, and what they hear."""
    return {
        "no certificate": (house.meet(None, None), UNAVAILABLE, ""),
        "the anonymous certificate": (house.unauthenticated(), UNAUTHENTICATED, "not_logged_in"),
        "a certificate of another CA": (
            own(house, Authority.open(tmp_path_factory.mktemp("ca"), time.time())),
            UNAVAILABLE,
            "",
        ),
        "a forged certificate": (forge(house), UNAVAILABLE, ""),
        "a key that has expired": (expired(house), UNAUTHENTICATED, "key_expired"),
        "a key that was revoked": (revoked(house), UNAUTHENTICATED, "key_revoked"),
    }


def forge(house: House) -> Guest:
    """Signed with the key that every client has."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key, request = make_request()
    signer = serialization.load_pem_private_key(anonymous.KEY.encode(), None)
    issuer = x509.load_pem_x509_certificate(anonymous.CERTIFICATE.encode())
    builder = (
        x509.CertificateBuilder()
        .subject_name(issuer.subject)
        .issuer_name(issuer.subject)
        .public_key(read_request(request).public_key())
        .serial_number(2)
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier("k8e:uid:0")]), False)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]), False)
    )
    certificate = builder.sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    return house.meet(key, certificate.public_bytes(serialization.Encoding.PEM))


def expired(house: House) -> Guest:
    guest = house.guest(house.make_key("brief", ttl=1.5, scope="admin"))
    assert guest.call("Status", pb.StatusRequest()).name == "brief"

    def is_over() -> bool:
        try:
            guest.call("Status", pb.StatusRequest())
        except grpc.RpcError:
            return True
        return False

    wait_until(is_over)
    return guest


def revoked(house: House) -> Guest:
    guest = house.tenant("gone", scope="admin")
    assert guest.call("Status", pb.StatusRequest()).name == "gone"
    house.delete_key("gone")
    return guest


@pytest.mark.parametrize("method", sorted(METHODS))
def test_unauthenticated_callers_are_refused(
    refused: dict[str, tuple[Guest, grpc.StatusCode, str]], session: str, run: str, method: str
) -> None:
    heard = {}
    for who, (guest, _, _) in refused.items():
        code, detail = guest.refused(method, *ask(method, run if method in OF_RUNS else session))
        heard[who] = (code, detail.code if detail else "")
    expected = {who: (code, word) for who, (_, code, word) in refused.items()}
    # Whose key has expired has a certificate that has, too; which of the two is noticed first does not matter.
    for answers in (heard, expected):
        answers["a key that has expired"] = (*answers["a key that has expired"][:1], "")
    assert heard == expected


@pytest.mark.parametrize("method", [*OF_SESSIONS, *OF_RUNS])
def test_what_is_somebody_elses_is_not_there(
    house: House, rival: Guest, acme: Guest, session: str, run: str, method: str
) -> None:
    theirs, missing = (run, "run-0000000000000000") if method in OF_RUNS else (session, "sess-0000000000000000")
    code, detail = rival.refused(method, *ask(method, theirs))
    other_code, other_detail = rival.refused(method, *ask(method, missing))
    assert detail is not None
    assert other_detail is not None
    assert code is other_code is grpc.StatusCode.NOT_FOUND
    assert str(detail).replace(theirs, "ID") == str(other_detail).replace(missing, "ID")
    # A user of the machine who is not root knows nothing of tenants either, and root sees all.
    assert acme.call("PollRun", pb.PollRunRequest(run_id=run)).run.status == "running"
    assert house.root().call("GetSession", pb.GetSessionRequest(session_id=session)).session.tenant_id == "acme"
    assert acme.call("ReadFile", pb.ReadFileRequest(session_id=session, path="x")).content == b"secret"


def test_lists_have_what_is_ones_own(house: House, rival: Guest, session: str) -> None:
    mine = rival.create()
    for phase in ("active", "all"):
        listed = rival.call("ListSessions", pb.ListSessionsRequest(phase=phase)).sessions
        assert {one.session_id for one in listed} == {mine}
    assert rival.call("Status", pb.StatusRequest()).sessions == 1
    operator = house.guest(house.make_key("boss", scope="operator", tenant_ids=["rival", "acme"]))
    listed = operator.call("ListSessions", pb.ListSessionsRequest()).sessions
    assert {one.tenant_id for one in listed} == {"rival", "acme"}
    lesser = house.guest(house.make_key("lesser", scope="operator", tenant_ids=["rival"]))
    listed = lesser.call("ListSessions", pb.ListSessionsRequest()).sessions
    assert {one.session_id for one in listed} == {mine}
    assert {one.tenant_id for one in house.root().call("ListSessions", pb.ListSessionsRequest()).sessions} >= {"acme"}


def test_the_same_id_is_another_session_for_another_tenant(acme: Guest, rival: Guest) -> None:
    assert acme.create(session_id="shared") == rival.create(session_id="shared") == "shared"
    acme.run("shared", "echo acme > who")
    rival.run("shared", "echo rival > who")
    assert acme.run("shared", "cat who").stdout == b"acme\n"
    assert rival.run("shared", "cat who").stdout == b"rival\n"


def test_a_local_users_tenant_is_not_the_gateways(house: House, acme: Guest) -> None:
    status, created = house.ask("POST", "/v1/sessions", {"tenant_id": "acme"})
    assert status == 201
    code, _ = acme.refused("GetSession", pb.GetSessionRequest(session_id=created["session_id"]))
    assert code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("scope", ["run", "operator"])
@pytest.mark.parametrize("method", [*OF_ADMINS, *OF_OPERATORS])
def test_a_scope_is_not_exceeded(house: House, scope: str, method: str) -> None:
    name = f"{scope}-{method}"
    guest = house.guest(house.make_key(name, scope=scope, tenant_ids=["acme"]))
    code, detail = guest.refused(method, *ask(method))
    if method in OF_OPERATORS and scope == "operator":
        assert (code, detail and detail.code) == (grpc.StatusCode.NOT_FOUND, "approval_not_found")
        return
    assert (code, detail and detail.code) == (grpc.StatusCode.PERMISSION_DENIED, "scope_missing")


def test_an_admin_manages_keys_from_afar(house: House) -> None:
    admin = house.tenant("chief", scope="admin")
    made = admin.call("CreateApiKey", pb.CreateApiKeyRequest(name="far", ttl=-1, tenant_ids=["away"]))
    assert (made.api_key.name, made.api_key.expires_at, list(made.api_key.tenant_ids)) == ("far", 0, ["away"])
    assert house.guest(made.key).call("Status", pb.StatusRequest()).tenant_id == "away"
    listed = {key.name: key for key in admin.call("ListApiKeys", pb.ListApiKeysRequest()).api_keys}
    assert listed["far"].last_used > 0
    code, detail = admin.refused("CreateApiKey", pb.CreateApiKeyRequest(name="far"))
    assert (code, detail and detail.code) == (grpc.StatusCode.ALREADY_EXISTS, "key_exists")
    admin.call("DeleteApiKey", pb.DeleteApiKeyRequest(name="far"))
    code, detail = admin.refused("DeleteApiKey", pb.DeleteApiKeyRequest(name="far"))
    assert (code, detail and detail.code) == (grpc.StatusCode.NOT_FOUND, "key_not_found")
