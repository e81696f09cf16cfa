"""Authorities of a cluster and their certificates, as Go's and OpenSSL's rules want them; renewed in time."""

from __future__ import annotations

import datetime
import os
import ssl
import stat
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from hypothesis import given
from hypothesis import strategies as st

from k8e.cluster.errors import ClusterError
from k8e.cluster.trust.authority import LEAF_LIFE, Authority, Leaf
from k8e.cluster.trust.leaves import Leaves, make_signing_key, read_public_key, write_file

NOW = 1_790_000_000.0
SERVER = Leaf("kube-apiserver", hosts=("kubernetes.default.svc", "10.0.0.1"))
NODE = Leaf("system:node:one", ("system:nodes",))
AUTHORITY = Authority.make("k8e test", NOW)
OTHER = Authority.make("k8e test", NOW)


def read(content: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(content)


class TestAuthority:
    def test_vouches_for_a_server_and_for_no_other(self, tmp_path: Path) -> None:
        authority = Authority.make("k8e test", time.time())
        content = authority.issue(SERVER, time.time())
        verifier = PolicyBuilder().store(Store([read(authority.certificate)]))
        verifier.build_server_verifier(x509.DNSName("kubernetes.default.svc")).verify(read(content), [])
        with pytest.raises(VerificationError):
            verifier.build_server_verifier(x509.DNSName("other.svc")).verify(read(content), [])
        with pytest.raises(VerificationError):
            other = PolicyBuilder().store(Store([read(OTHER.certificate)]))
            other.build_server_verifier(x509.DNSName("kubernetes.default.svc")).verify(read(content), [])
        path = write_file(tmp_path / "server.pem", content)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path)  # one file with both

    @pytest.mark.parametrize(("apart", "believed"), [(-60, True), (-240, True), (-600, False), (60, True)])
    def test_is_believed_where_the_clock_is_a_minute_apart(self, apart: float, believed: bool) -> None:
        """By a machine that joins in the minute in which the cluster and its certificates were made."""
        there = datetime.datetime.fromtimestamp(NOW + apart, datetime.UTC).replace(tzinfo=None)
        verifier = PolicyBuilder().store(Store([read(AUTHORITY.certificate)])).time(there)
        certificate = read(AUTHORITY.issue(SERVER, NOW))
        checked = verifier.build_server_verifier(x509.DNSName("kubernetes.default.svc"))
        if believed:
            checked.verify(certificate, [])
        else:
            with pytest.raises(VerificationError):
                checked.verify(certificate, [])

    def test_gives_a_client_its_user_and_groups(self) -> None:
        subject = read(AUTHORITY.issue(NODE, NOW)).subject
        assert [each.value for each in subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["system:node:one"]
        assert [each.value for each in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ["system:nodes"]

    def test_is_the_same_when_it_is_opened_again(self, tmp_path: Path) -> None:
        first = Authority.open(tmp_path / "ca", "k8e test", NOW)
        assert Authority.open(tmp_path / "ca", "k8e test", NOW + 1).fingerprint == first.fingerprint
        assert stat.S_IMODE((tmp_path / "ca" / "ca.key").stat().st_mode) == 0o600

    def test_is_made_anew_when_it_was_cut_off_before_its_key(self, tmp_path: Path) -> None:
        first = Authority.open(tmp_path, "k8e test", NOW)
        (tmp_path / "ca.key").unlink()
        assert Authority.open(tmp_path, "k8e test", NOW).fingerprint != first.fingerprint

    @pytest.mark.parametrize("name", ["ca.crt", "ca.key"])
    def test_is_not_replaced_when_it_is_damaged(self, tmp_path: Path, name: str) -> None:
        Authority.open(tmp_path, "k8e test", NOW)
        before = (tmp_path / name).read_bytes()
        Authority.open(tmp_path / "other", "k8e test", NOW)
        for damage in (b"x", b"", (tmp_path / "other" / name).read_bytes()):
            (tmp_path / name).write_bytes(damage)
            with pytest.raises(ClusterError, match="authority_unusable"):
                Authority.open(tmp_path, "k8e test", NOW)
        (tmp_path / name).write_bytes(before)
        (tmp_path / "ca.crt").unlink()
        with pytest.raises(ClusterError, match="authority_unusable"):
            Authority.open(tmp_path, "k8e test", NOW)


class TestLeaf:
    CONTENT = AUTHORITY.issue(SERVER, NOW)

    @given(st.floats(0, LEAF_LIFE * 3))
    def test_is_good_until_a_third_of_its_life_is_left(self, age: float) -> None:
        margin = 600  # the certificate begins a little earlier than it was issued
        good = AUTHORITY.is_good(self.CONTENT, SERVER, NOW + age)
        if age < LEAF_LIFE * 2 / 3 - margin:
            assert good
        elif age > LEAF_LIFE * 2 / 3 + margin:
            assert not good

    @given(st.floats(600, 10 * LEAF_LIFE))
    def test_of_the_future_is_not_good(self, ahead: float) -> None:
        assert not AUTHORITY.is_good(self.CONTENT, SERVER, NOW - ahead)

    @given(st.binary(max_size=200), st.integers(0, 3000))
    def test_that_is_damaged_is_not_good(self, noise: bytes, place: int) -> None:
        place %= len(self.CONTENT)
        cut = self.CONTENT[:place] + noise
        # Text behind the last line of a PEM is no damage.
        assert not AUTHORITY.is_good(cut, SERVER, NOW) or cut.startswith(self.CONTENT.strip())

    def test_of_another_is_not_good(self) -> None:
        for leaf in (NODE, Leaf("kube-apiserver"), Leaf("kube-apiserver", hosts=("10.0.0.2",)), Leaf("other")):
            assert not AUTHORITY.is_good(self.CONTENT, leaf, NOW), leaf
        assert not OTHER.is_good(self.CONTENT, SERVER, NOW)


class TestLeaves:
    def test_are_renewed_once_and_in_time(self, tmp_path: Path) -> None:
        now = [NOW]
        leaves = Leaves(tmp_path, lambda: now[0])
        path = leaves.write("server", AUTHORITY, SERVER)
        first = path.read_bytes()
        now[0] += LEAF_LIFE / 2
        assert leaves.renew() == []
        assert path.read_bytes() == first
        now[0] += LEAF_LIFE / 4
        assert leaves.renew() == ["server"]
        assert leaves.renew() == []
        assert read(path.read_bytes()).not_valid_after_utc.timestamp() == now[0] + LEAF_LIFE

    def test_of_a_machine_that_was_off_for_long_are_new(self, tmp_path: Path) -> None:
        path = Leaves(tmp_path, lambda: NOW).write("server", AUTHORITY, SERVER)
        first = path.read_bytes()
        assert Leaves(tmp_path, lambda: NOW + 10).write("server", AUTHORITY, SERVER).read_bytes() == first
        late = Leaves(tmp_path, lambda: NOW + 100 * LEAF_LIFE).write("server", AUTHORITY, SERVER).read_bytes()
        assert AUTHORITY.is_good(late, SERVER, NOW + 100 * LEAF_LIFE)

    def test_are_their_owners_alone(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o711)
        leaves = Leaves(tmp_path, lambda: NOW)
        paths = {owner: leaves.write(f"of-{owner}", AUTHORITY, NODE, owner) for owner in (0, 4711)}
        for owner, path in paths.items():
            assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (owner, 0o600)
        assert leaves.renew() == []
        os.chown(paths[4711], 4712, 4712)
        assert leaves.renew() == ["of-4711"]
        assert paths[4711].stat().st_uid == 4711
        assert sorted(os.listdir(tmp_path)) == ["of-0.pem", "of-4711.pem"]


def test_a_signing_key_is_made_once(tmp_path: Path) -> None:
    path = make_signing_key(tmp_path / "service-account.key")
    assert read_public_key(path) == read_public_key(make_signing_key(path))
    assert b"PUBLIC KEY" in read_public_key(path)
