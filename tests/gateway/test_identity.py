"""Keys and certificates: what they are made of, whom they stand for, and when they stop."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8e.cli.process import Failure
from k8e.cli.remote.connection import log_in, open_channel, read_detail, renew
from k8e.core.access.keys import CLIENT_LIFE
from k8e.doors.grpc import sandbox_pb2 as pb
from k8e.identity import anonymous
from k8e.identity.api_key import ApiKey, BadKey, state_login, verify_login
from k8e.identity.authority import (
    SERVER_LIFE,
    Authority,
    BadRequest,
    make_request,
    read_request,
    request_content,
)
from k8e.identity.register import KeyRecord, Register
from tests.cli.machine import wait_until
from tests.gateway.house import House

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


class TestKeyText:
    @given(st.binary(min_size=8, max_size=8), st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
    def test_says_everything_and_comes_back(self, key_id: bytes, fingerprint: bytes, secret: bytes) -> None:
        key = ApiKey(key_id, fingerprint, secret)
        assert ApiKey.parse(f" {key.text}\n") == key
        assert len(key.text) == 106

    def test_that_was_changed_anywhere_is_noticed(self) -> None:
        text = ApiKey.generate(bytes(32)).text
        for at in range(4, len(text) - 1):
            other = "A" if text[at] != "A" else "B"
            with pytest.raises(BadKey):
                ApiKey.parse(text[:at] + other + text[at + 1 :])
        for broken in (text[:-1], text + "A", text[4:], "", "k8e_", "k8e_\u00e9"):
            with pytest.raises(BadKey):
                ApiKey.parse(broken)

    def test_shows_its_secret_nowhere_else(self) -> None:
        key = ApiKey.generate(bytes(32))
        assert repr(key.secret) not in repr(key)
        assert key.secret not in key.public

    def test_proves_itself_for_one_gateway_one_key_and_one_request(self) -> None:
        key = ApiKey.generate(bytes(32))
        signature = key.sign_login(b"request")
        assert verify_login(key.public, signature, state_login(key.fingerprint, key.key_id, b"request"))
        for statement in (
            state_login(b"\1" * 32, key.key_id, b"request"),
            state_login(key.fingerprint, b"\1" * 8, b"request"),
            state_login(key.fingerprint, key.key_id, b"another"),
        ):
            assert not verify_login(key.public, signature, statement)
        assert not verify_login(ApiKey.generate(bytes(32)).public, signature, statement)


class TestAuthority:
    def test_is_the_same_the_next_time(self, tmp_path: Path) -> None:
        first, second = (Authority.open(tmp_path / "ca", time.time()) for _ in range(2))
        assert first.fingerprint == second.fingerprint
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ca").iterdir()}
        assert modes == {"ca.crt": 0o644, "ca.key": 0o600}

    def test_with_files_that_do_not_belong_together_is_none(self, tmp_path: Path) -> None:
        Authority.open(tmp_path / "a", time.time())
        Authority.open(tmp_path / "b", time.time())
        shutil.copy(tmp_path / "a" / "ca.crt", tmp_path / "b" / "ca.crt")
        with pytest.raises(ValueError, match="do not belong together"):
            Authority.open(tmp_path / "b", time.time())

    def test_knows_its_own_clients_and_no_others(self, tmp_path: Path) -> None:
        ours, theirs = (Authority.open(tmp_path / name, time.time()) for name in ("a", "b"))
        now = time.time()
        _, request = make_request()
        mine = ours.issue_client(request, "k8e:uid:7", now, now + 60)
        peer = ours.identify(mine)
        assert peer is not None
        assert (peer.identity, peer.expires) == ("k8e:uid:7", int(now + 60))
        server = ours.issue_server(["localhost"], now)
        for other in (
            theirs.issue_client(request, "k8e:uid:7", now, now + 60),
            server.chain,
            ours.certificate,
            anonymous.CERTIFICATE.encode(),
            b"",
            b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
        ):
            assert ours.identify(other) is None

    def test_renews_when_a_third_is_left(self, tmp_path: Path) -> None:
        now = time.time()
        certificate = Authority.open(tmp_path, now).issue_server(["localhost", "::1"], now)
        assert not certificate.is_worn(now + SERVER_LIFE * 0.66)
        assert certificate.is_worn(now + SERVER_LIFE * 0.67)

    @pytest.mark.parametrize("size", [0, 1, 100, 20_000])
    def test_takes_no_nonsense_for_a_request(self, size: int) -> None:
        with pytest.raises(BadRequest):
            read_request("x" * size)

    def test_takes_requests_for_its_own_kind_of_keys_only(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec, rsa

        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        for key in (rsa.generate_private_key(65_537, 2048), ec.generate_private_key(ec.SECP384R1())):
            text = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
            with pytest.raises(BadRequest):
                read_request(text)


class TestRegister:
    def test_survives(self, tmp_path: Path) -> None:
        register = Register(tmp_path / "keys.json")
        assert register.add(KeyRecord("a", "01", "ff", "run", ("t",), 1.0, None))
        assert not register.add(KeyRecord("a", "02", "ff", "run", ("t",), 1.0, None))
        register.touch("01", 5.0)
        register.revoke("01", 6.0)
        assert register.add(KeyRecord("a", "03", "ff", "run", ("t", "u"), 2.0, 9.0))
        again = Register(tmp_path / "keys.json")
        assert [(key.key_id, key.tenants) for key in again.living()] == [("03", ("t", "u"))]
        found = again.find("01")
        assert found is not None
        assert (found.last_used, found.revoked) == (5.0, 6.0)
        assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600

    def test_that_is_broken_lets_no_client_in(self, tmp_path: Path) -> None:
        (tmp_path / "keys.json").write_text("{")
        with pytest.raises(ValueError, match="Expecting"):
            Register(tmp_path / "keys.json")


class TestKeys:
    def test_are_kept_as_what_cannot_be_used(self, house: House) -> None:
        key = ApiKey.parse(house.make_key("kept"))
        folder = house.machine.folder
        content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        for form in (key.secret, key.secret.hex().encode(), key.text.encode(), key.text[-60:].encode()):
            assert form not in content
        assert key.public.hex().encode() in content

    def test_are_exchanged_for_ninety_days_or_their_own_life(self, house: House) -> None:
        for ttl, life in ((3600, 3600.0), (86_400 * 365, CLIENT_LIFE)):
            found = house.log_in(house.make_key(f"ttl-{ttl}", ttl=ttl))
            assert abs(found.expires_at - time.time() - life) < 60

    def test_of_another_gateway_are_refused_before_anything_is_sent(self, house: House) -> None:
        foreign = ApiKey.generate(bytes(32))
        with pytest.raises(Failure) as refused:
            log_in(house.endpoint, foreign)
        assert refused.value.body["code"] == "wrong_gateway"

    @pytest.mark.parametrize("fault", ["unknown id", "wrong secret", "no signature", "another request"])
    def test_have_to_be_proven(self, house: House, fault: str) -> None:
        key = ApiKey.parse(house.make_key(fault.replace(" ", "-")))
        _, request = make_request()
        _, other = make_request()
        content = request_content(other if fault == "another request" else request)
        secret = bytes(32) if fault == "wrong secret" else key.secret
        signature = ApiKey(key.key_id, key.fingerprint, secret).sign_login(content)
        message = pb.LoginRequest(
            key_id="00" * 8 if fault == "unknown id" else key.key_id.hex(),
            csr=request,
            signature=b"" if fault == "no signature" else signature,
        )
        code, detail = house.unauthenticated().refused("Login", message)
        assert (code, detail and detail.code) == (UNAUTHENTICATED, "key_refused")

    def test_that_are_revoked_end_streams_connections_and_renewals_at_once(self, house: House) -> None:
        text = house.make_key("doomed")
        guest, other = house.guest(text), house.guest(text)
        session = guest.create()
        waiting = other.begin("ExecStream", pb.ExecRequest(session_id=session, command="sleep 65"))
        assert next(waiting).HasField("started")
        house.delete_key("doomed")
        with pytest.raises(grpc.RpcError) as ended:
            next(waiting)
        detail = read_detail(ended.value)
        assert (ended.value.code(), detail and detail.code) == (UNAUTHENTICATED, "key_revoked")
        for guest_or_other in (guest, other):
            code, detail = guest_or_other.refused("Login", pb.LoginRequest(csr=make_request()[1]))
            assert (code, detail and detail.code) == (UNAUTHENTICATED, "key_revoked")
        with pytest.raises(Failure) as refused:
            house.log_in(text)
        assert refused.value.body["code"] == "key_revoked"
        # The command ends with the call that waited for it.
        root = house.root()
        ask = pb.PsRequest(session_id=session)
        wait_until(lambda: not root.call("Ps", ask).processes)
        # The name is free again, for a key that is another one.
        new = house.guest(house.make_key("doomed"))
        assert new.call("Status", pb.StatusRequest()).name == "doomed"
        assert guest.refused("Status", pb.StatusRequest())[0] is UNAUTHENTICATED

    def test_that_are_revoked_say_so_also_to_who_has_not_read_the_first_answer_yet(self, house: House) -> None:
        text = house.make_key("slow", tenant_ids=["slow"])
        guest = house.guest(text)
        session = guest.create()
        content = bytes(8 << 20)  # more than fits on the way to a client that does not read
        guest.call("WriteFile", pb.WriteFileRequest(session_id=session, path="x", content=content))
        reading = guest.begin("ReadFile", pb.ReadFileRequest(session_id=session, path="x"), seconds=30)
        reading.initial_metadata()  # the answer has begun
        house.delete_key("slow")
        with pytest.raises(grpc.RpcError) as ended:
            list(reading)
        detail = read_detail(ended.value)
        assert (ended.value.code(), detail and detail.code) == (UNAUTHENTICATED, "key_revoked")

    def test_are_the_administrators_to_make(self, house: House) -> None:
        assert house.ask("POST", "/v1/keys", {"name": "-x"})[0] == 400
        assert house.ask("POST", "/v1/keys", {"name": "x", "ttl": -1})[0] == 400
        assert house.ask("POST", "/v1/keys", {"name": "x", "tenant_ids": ["a", "b"]})[0] == 400
        assert house.ask("POST", "/v1/keys", {"name": "x", "scope": "god"})[0] == 400
        status, answer = house.ask("GET", "/v1/keys")
        assert status == 200
        assert "key" not in json.dumps(answer["keys"]).replace("key_id", "").replace('"keys"', "")


class TestCertificates:
    def test_are_renewed_by_themselves(self, house: House) -> None:
        found = house.log_in(house.make_key("lasting"))
        renewed = renew(found)
        assert renewed.certificate != found.certificate
        guest = house.meet(renewed.key.encode(), renewed.certificate.encode())
        assert guest.call("Status", pb.StatusRequest()).name == "lasting"

    def test_of_local_users_are_theirs_for_a_day(self, house: House) -> None:
        key, request = make_request()
        status, login = house.ask("POST", "/v1/login", {"csr": request})
        assert (status, login["endpoint"]) == (200, house.endpoint)
        assert 86_000 < login["expires_at"] - time.time() <= 86_400
        guest = house.meet(key, login["certificate"].encode())
        assert guest.call("Status", pb.StatusRequest()).name == "uid:0"

    def test_of_local_users_end_with_their_day(self, house: House) -> None:
        """A user who has lost the socket, root among them, cannot go on from certificate to certificate."""
        _, request = make_request()
        code, detail = house.root().refused("Login", pb.LoginRequest(csr=request))
        assert detail is not None
        assert (code, detail.code) == (grpc.StatusCode.PERMISSION_DENIED, "renewed_at_socket")
        assert "unix socket" in detail.hint
        assert house.ask("POST", "/v1/login", {"csr": "x"})[0] == 400

    def test_only_tls_1_3_is_spoken(self, house: House) -> None:
        def shake(version: str) -> str:
            command = ["openssl", "s_client", version, "-alpn", "h2", "-connect", house.endpoint]
            done = subprocess.run(command, capture_output=True, text=True, input="", timeout=30)
            return done.stdout + done.stderr

        assert "TLSv1.3, Cipher is TLS_AES" in shake("-tls1_3")
        assert "Cipher is (NONE)" in shake("-tls1_2")

    def test_have_the_names_that_clients_use(self, house: House) -> None:
        port = house.endpoint.rpartition(":")[2]
        for name in ("localhost", "127.0.0.1"):
            guest = house.root()
            channel = open_channel(f"{name}:{port}", guest.roots, guest.key or b"", guest.certificate or b"")
            with channel:
                grpc.channel_ready_future(channel).result(30)
