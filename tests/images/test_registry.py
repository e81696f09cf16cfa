"""Pulling, from a registry of the distribution, from one with faults, and from ones that mean no good."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.engine.images import Credentials, Progress
from k8e.engine.local.images import LocalImages, Store
from k8e.engine.local.images.download import partial_name
from k8e.engine.local.images.registry import Registry, make_context
from k8e.engine.local.layout import Layout
from k8e.engine.reference import parse_reference
from tests.images.builder import ARCHITECTURE, DOCKER, OCI, OTHER, Built, build, digest_of, entry, make_index, make_tar
from tests.images.conftest import ignore
from tests.images.registry import (
    PASSWORD,
    USER,
    Authority,
    RealRegistry,
    Shears,
    TokenService,
    reply,
    run_registry,
    run_tokens,
    serve_http,
)

ALICE = Credentials(USER, PASSWORD)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with run_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder)
    with run_registry(folder, htpasswd=True, tls=authority) as running:
        yield running


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenService]:
    with run_tokens(tmp_path_factory.mktemp("tokens")) as service:
        yield service


@pytest.fixture(scope="module")
def bearer(tokens: TokenService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with run_registry(tmp_path_factory.mktemp("bearer"), tokens=tokens) as running:
        yield running


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    init = Registry.__init__
    monkeypatch.setattr(Registry, "__init__", lambda *args, **more: init(*args, **{**more, "pause": 0.001}))


def simple(content: bytes, **settings: str) -> Built:
    return build(make_tar(entry("f", content)), **settings)  # type: ignore[arg-type]


@contextlib.contextmanager
def refusing(reason: str, words: str = "") -> Iterator[None]:
    with pytest.raises(EngineError) as caught:
        yield
    assert (caught.value.control, caught.value.reason) == ("image", reason), caught.value
    assert words in f"{caught.value.cause} {caught.value.hint}"


class TestPulling:
    @pytest.mark.parametrize("family", [OCI, DOCKER], ids=["oci", "docker"])
    async def test_layers_in_every_packing(self, images: LocalImages, registry: RealRegistry, family: str) -> None:
        layers = [make_tar(entry(f"f{number}", os.urandom(300_000))) for number in range(3)]
        ways = ["gzip", "zstd" if family == OCI else "plain", "plain"]
        built = build(*layers, how=ways, family=family, config={"Env": ["A=b"], "Cmd": ["sh"]})
        heard: list[Progress] = []
        image = await images.pull(registry.push(f"kinds/{family[-5:-1]}", built), None, heard.append)
        assert (image.digest, image.size, image.env) == (built.digest, 900_000, (("A", "b"),))
        assert [path.name for path in images.store.layers_of(image.digest)] == built.diff_ids
        assert [os.listdir(path) for path in images.store.layers_of(image.digest)] == [["f0"], ["f1"], ["f2"]]
        last = [progress for progress in heard if progress.step == "downloading"][-1]
        assert last.done == last.total == sum(len(built.blobs[digest]) for digest in built.layers)
        assert list(images.store.partial.iterdir()) == []

    @pytest.mark.parametrize("family", [OCI, DOCKER], ids=["oci", "docker"])
    async def test_of_many_platforms_this_machines(
        self, images: LocalImages, registry: RealRegistry, family: str
    ) -> None:
        ours, theirs = simple(b"ours", family=family), simple(b"theirs", architecture=OTHER, family=family)
        index = make_index((OTHER, theirs), (ARCHITECTURE, ours), family=family)
        name = registry.push("many", index, tag=family[-5:-1])
        assert (await images.pull(name, None, ignore)).digest == ours.digest
        by_digest = f"{registry.host}/many@{index.digest}"
        assert (await images.pull(by_digest, None, ignore)).digest == ours.digest

    async def test_no_image_for_this_machine(self, images: LocalImages, registry: RealRegistry) -> None:
        foreign = simple(b"x", architecture=OTHER)
        with refusing("no_platform", f"only for linux/{OTHER}"):
            await images.pull(registry.push("foreign", make_index((OTHER, foreign))), None, ignore)
        with refusing("no_platform", f"this machine is linux/{ARCHITECTURE}"):
            await images.pull(registry.push("foreign", foreign, "single"), None, ignore)

    async def test_what_is_here_is_not_fetched_again(self, images: LocalImages, registry: RealRegistry) -> None:
        shared, one, other = (make_tar(entry(name, os.urandom(200_000))) for name in "abc")
        first, second = build(shared, one), build(shared, other)
        await images.pull(registry.push("shared", first, "1"), None, ignore)
        registry.push("shared", second, "2")
        shears = Shears(registry, 0, 0)
        with serve_http(shears) as host:
            await images.pull(f"{host}/shared:2", None, ignore)
            assert shears.passed == len(second.blobs[second.layers[1]])
            await images.pull(f"{host}/shared:2", None, ignore)
            assert len(shears.ranges) == 1
        assert len(list(images.store.layer("x").parent.iterdir())) == 3

    async def test_many_at_once_do_the_work_once(self, images: LocalImages, registry: RealRegistry) -> None:
        built = build(*(make_tar(entry("f", os.urandom(400_000))) for _ in range(3)))
        registry.push("once", built)
        shears = Shears(registry, 0, 0)
        with serve_http(shears) as host:
            pulled = await asyncio.gather(*(images.pull(f"{host}/once", None, ignore) for _ in range(6)))
        assert {image.digest for image in pulled} == {built.digest}
        assert len(shears.ranges) == 3

    async def test_a_cancelled_pull_leaves_nothing_but_its_half(
        self, images: LocalImages, layout: Layout, registry: RealRegistry
    ) -> None:
        built = simple(os.urandom(3_000_000))
        registry.push("cancelled", built)
        begun = asyncio.Event()
        pulling = asyncio.create_task(images.pull(f"{registry.host}/cancelled", None, lambda _: begun.set()))
        await begun.wait()
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert [path for path in layout.layers.iterdir() if path.name.startswith(".")] == []
        assert (await images.pull(f"{registry.host}/cancelled", None, ignore)).digest == built.digest


class TestFaults:
    async def test_a_cut_connection_is_continued(self, images: LocalImages, registry: RealRegistry) -> None:
        built = simple(os.urandom(2_000_000))
        registry.push("cut", built)
        shears = Shears(registry, 600_000, cuts=3)
        with serve_http(shears) as host:
            await images.pull(f"{host}/cut", None, ignore)
        size = len(built.blobs[built.layers[0]])
        assert shears.ranges == ["", "bytes=600000-", "bytes=1200000-", "bytes=1800000-"]
        assert shears.passed == size

    async def test_another_pull_goes_on_where_the_last_stopped(
        self, images: LocalImages, layout: Layout, registry: RealRegistry
    ) -> None:
        built = simple(os.urandom(1_000_000))
        registry.push("later", built)
        shears = Shears(registry, 0, cuts=1_000_000)
        with serve_http(shears) as host:
            shears._cut_after = 700_000
            shears.cuts = 1
            with contextlib.suppress(EngineError):
                async with asyncio.timeout(30):
                    shears_then_nothing = asyncio.create_task(images.pull(f"{host}/later", None, ignore))
                    while not shears.ranges:
                        await asyncio.sleep(0.001)
                    shears.cuts, shears._cut_after = 1_000_000, 0
                    await shears_then_nothing
            assert [path.stat().st_size for path in images.store.partial.iterdir()] == [700_000]
            next_daemon = LocalImages(layout, store=Store(layout, fresh=0))
            shears.ranges, shears.passed, shears.cuts = [], 0, 0
            await next_daemon.pull(f"{host}/later", None, ignore)
        assert shears.ranges == ["bytes=700000-"]
        assert shears.passed == len(built.blobs[built.layers[0]]) - 700_000

    async def test_half_of_something_else_is_thrown_away(self, images: LocalImages, registry: RealRegistry) -> None:
        built = simple(os.urandom(500_000))
        name = registry.push("poisoned", built)
        images.store.prepare()
        (images.store.partial / partial_name(registry.host, built.layers[0])).write_bytes(b"poison" * 1000)
        assert (await images.pull(name, None, ignore)).digest == built.digest

    async def test_nobody_waits_for_a_registry_that_somebody_else_chose(
        self, images: LocalImages, registry: RealRegistry
    ) -> None:
        """It offers the same layer, and never sends it to its end."""
        built = simple(os.urandom(400_000))
        name = registry.push("waited", built)
        begun, over = threading.Event(), threading.Event()

        def stall(handler: http.server.BaseHTTPRequestHandler) -> None:
            if handler.path.endswith(built.layers[0]):
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(built.blobs[built.layers[0]])))
                handler.end_headers()
                begun.set()
                over.wait(60)
                handler.close_connection = True
                return None
            last = handler.path.rpartition("/")[2]
            return reply(handler, 200, built.blobs.get(last, built.manifest), Content_Type=built.media_type)

        with serve_http(stall) as host:
            slow = asyncio.create_task(images.pull(f"{host}/slow", None, ignore))
            try:
                await asyncio.to_thread(begun.wait, 60)
                async with asyncio.timeout(60):
                    assert (await images.pull(name, None, ignore)).digest == built.digest
                assert not slow.done()
            finally:
                slow.cancel()
                await asyncio.wait({slow})
                over.set()

    async def test_busy_registries_are_asked_again(self, images: LocalImages, registry: RealRegistry) -> None:
        built = simple(b"busy")
        registry.push("busy", built)
        shears, trouble = Shears(registry, 0, 0), [503, 429, 500]

        def handle(handler: http.server.BaseHTTPRequestHandler) -> None:
            if trouble:
                return reply(handler, trouble.pop())
            return shears(handler)

        with serve_http(handle) as host:
            assert (await images.pull(f"{host}/busy", None, ignore)).digest == built.digest

    async def test_what_is_wrong_is_said(self, images: LocalImages, registry: RealRegistry) -> None:
        with refusing("not_found", "there is no"):
            await images.pull(f"{registry.host}/nothing:here", None, ignore)
        with refusing("invalid"):
            await images.pull("-v/:/host", None, ignore)
        with serve_http(lambda handler: reply(handler, 429, Retry_After="3600")) as host, refusing("rate_limited"):
            await images.pull(f"{host}/x", None, ignore)
        with serve_http(lambda handler: reply(handler, 500)) as host, refusing("unreachable", "500"):
            await images.pull(f"{host}/x", None, ignore)
        with refusing("unreachable"):
            await images.pull("localhost:1/x", None, ignore)


class TestIdentity:
    async def test_tls_by_a_ca_of_the_machine_and_a_password(
        self, layout: Layout, images: LocalImages, guarded: RealRegistry
    ) -> None:
        built = simple(b"guarded")
        name = guarded.push("guarded", built)
        with refusing("untrusted", "SSL_CERT_FILE"):
            await images.pull(name, ALICE, ignore)

        async def trust() -> str:
            return guarded.trusted

        trusting = LocalImages(layout, trust=trust, store=Store(layout, fresh=0))
        with refusing("unauthorized", "docker login"):
            await trusting.pull(name, None, ignore)
        with refusing("unauthorized", "these credentials"):
            await trusting.pull(name, Credentials(USER, "wrong"), ignore)
        assert (await trusting.pull(name, ALICE, ignore)).digest == built.digest

    async def test_tokens_for_anybody_for_a_password_and_for_an_identity(
        self, images: LocalImages, bearer: RealRegistry, tokens: TokenService
    ) -> None:
        public, private, other = simple(b"public"), simple(b"private"), simple(b"other")
        name = bearer.push("public/demo", public)
        assert (await images.pull(name, None, ignore)).digest == public.digest
        assert tokens.asked[-1][:2] == ("GET", "")
        hidden = bearer.push("private/demo", private)
        with refusing("unauthorized"):
            await images.pull(hidden, None, ignore)
        assert (await images.pull(hidden, ALICE, ignore)).digest == private.digest
        bearer.push("private/demo", other, "2")
        identity = Credentials(identity_token="identity")
        image = await images.pull(f"{bearer.host}/private/demo:2", identity, ignore)
        assert image.digest == other.digest
        method, authorization, values = tokens.asked[-1]
        assert (method, authorization) == ("POST", "")
        assert (values["grant_type"], values["service"]) == ("refresh_token", "test-registry")
        assert values["scope"] == "repository:private/demo:pull"


class TestMischief:
    """A registry that is not what it should be."""

    def serve(self, built: Built, **changes: bytes) -> contextlib.AbstractContextManager[str]:
        def handle(handler: http.server.BaseHTTPRequestHandler) -> None:
            last = handler.path.rpartition("/")[2]
            digest = built.digest if "/manifests/" in handler.path and not last.startswith("sha256:") else last
            body = changes.get(digest.replace(":", "_"), built.blobs.get(digest))
            if body is None:
                return reply(handler, 404)
            return reply(handler, 200, body, Content_Type=built.media_type)

        return serve_http(handle)

    async def test_what_does_not_fit_its_digest(self, images: LocalImages, layout: Layout) -> None:
        built = simple(b"good" * 100)
        layer, config = built.layers[0], json.loads(built.manifest)["config"]["digest"]
        good = built.blobs[layer]
        for changes in (
            {layer.replace(":", "_"): bytes(len(good))},
            {layer.replace(":", "_"): good + b"more"},
            {config.replace(":", "_"): built.blobs[config].replace(b"linux", b"Linux")},
        ):
            with self.serve(built, **changes) as host, refusing("refused"):
                await images.pull(f"{host}/x", None, ignore)
        another = digest_of(b"another")
        lying = {another.replace(":", "_"): built.manifest}
        with self.serve(built, **lying) as host, refusing("refused", "something else"):
            await images.pull(f"{host}/x@{another}", None, ignore)
        assert os.listdir(layout.layers) == []
        assert await images.list() == []

    async def test_a_configuration_that_names_another_layer(self, images: LocalImages) -> None:
        """Else one image could put its own content into the layers of another one."""
        mine, victim = make_tar(entry("mine", b"1")), make_tar(entry("victim", b"2"))
        built = build(mine)
        config = json.loads(built.blobs[json.loads(built.manifest)["config"]["digest"]])
        config["rootfs"]["diff_ids"] = [digest_of(victim)]
        text = json.dumps(config).encode()
        manifest = json.loads(built.manifest)
        manifest["config"] |= {"digest": digest_of(text), "size": len(text)}
        body = json.dumps(manifest).encode()
        lying = Built(digest_of(body), built.media_type, {**built.blobs, digest_of(text): text, digest_of(body): body})
        with self.serve(lying) as host, refusing("refused", "not the one"):
            await images.pull(f"{host}/x", None, ignore)
        assert not images.store.has_layer(digest_of(victim)[7:])

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"[]",
            b"{",
            b"[" * 100_000,
            b'{"schemaVersion": 1}',
            b'{"layers": [], "manifests": []}',
            b'{"manifests": [{"digest": "sha256:../../../etc/passwd", "size": 1}]}',
            b'{"layers": [{"digest": "md5:1", "size": 1}], "config": {}}',
            b'{"layers": [{"size": -1, "digest": "sha256:%b"}], "config": {}}' % (b"0" * 64),
            b'{"layers": [{"size": 1, "mediaType": "text/html", "digest": "sha256:%b"}], "config": {}}' % (b"0" * 64),
            b'{"layers": [], "config": {"digest": "sha256:%b", "size": 99999999999}}' % (b"0" * 64),
            b" " * (5 << 20),
        ],
        ids=range(12),
    )
    async def test_manifests_that_are_none(self, images: LocalImages, body: bytes) -> None:
        with serve_http(lambda handler: reply(handler, 200, body)) as host, refusing("refused"):
            await images.pull(f"{host}/x", None, ignore)

    async def test_redirects_do_not_carry_credentials_and_are_in_no_log(
        self, images: LocalImages, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        built = simple(b"elsewhere")
        seen: list[tuple[str, str]] = []

        def storage(handler: http.server.BaseHTTPRequestHandler) -> None:
            seen.append((handler.path, handler.headers.get("Authorization", "")))
            reply(handler, 200, built.blobs[handler.path[1:].partition("?")[0]])

        def front(handler: http.server.BaseHTTPRequestHandler) -> None:
            if not handler.headers.get("Authorization"):
                return reply(handler, 401, WWW_Authenticate='Basic realm="x"')
            if "/blobs/" in handler.path:
                last = handler.path.rpartition("/")[2]
                return reply(handler, 307, Location=f"http://{elsewhere}/{last}?signature=s3cr3t")
            return reply(handler, 200, built.manifest, Content_Type=built.media_type)

        with serve_http(storage) as elsewhere, serve_http(front) as host:
            assert (await images.pull(f"{host}/x", ALICE, ignore)).digest == built.digest
        assert len(seen) == 2
        assert {authorization for _, authorization in seen} == {""}
        assert all("s3cr3t" in path for path, _ in seen)
        assert "s3cr3t" not in caplog.text

    async def test_redirects_in_circles(self, images: LocalImages) -> None:
        with serve_http(lambda handler: reply(handler, 302, Location=handler.path)) as host, refusing("unreachable"):
            await images.pull(f"{host}/x", None, ignore)

    @pytest.mark.parametrize(
        "target",
        [
            "http://registry.test/blob",
            "https://127.0.0.1:1/blob",
            "https://[::1]/blob",
            "http://169.254.169.254/latest/meta-data",
            "https://169.254.169.254/",
            "https://user:password@registry.test/",
            "file:///etc/passwd",
            "gopher://x/",
            "https:///",
            "//",
        ],
    )
    async def test_where_a_registry_elsewhere_may_not_send(self, target: str) -> None:
        """Nothing is sent anywhere: it is the address that is judged."""
        async with Registry(parse_reference("registry.test/x"), None, make_context("")) as registry:
            with refusing("refused"):
                registry._check_address(target)


async def test_prune_keeps_what_is_named_and_what_sandboxes_use(
    images: LocalImages, layout: Layout, tmp_path: Path
) -> None:
    from k8e.engine.local.record import Record
    from tests.images.builder import write_layout

    shared = make_tar(entry("shared", os.urandom(1000)))
    made = []
    for number in range(3):
        built = build(shared, make_tar(entry("own", bytes([number]) * 500)))
        made.append(await images.add(write_layout(tmp_path / "i.tar", built), ignore))
    named, used, unused = (image.digest for image in made)
    layout.sandbox("s1").top.mkdir(parents=True)
    Record("native", used, "", None, "h").save(layout.sandbox("s1").record)
    lost = images.store.layers_of(unused)[-1]
    assert await images.retain([named]) == 500
    assert {image.digest for image in await images.list()} == {named, used}
    assert not lost.exists()
    assert len(list(layout.layers.iterdir())) == 3
    with pytest.raises(KeyError):
        images.store.layers_of(unused)
    layout.sandbox("s1").record.write_text("{")
    with pytest.raises(EngineError, match="cannot be removed"):
        await images.retain([])
    assert len(await images.list()) == 2, "what cannot be known is not removed"
    layout.sandbox("s1").record.unlink()
    await images.retain([])
    assert await images.list() == []
    assert list(layout.layers.iterdir()) == []
    assert list((layout.oci / "layers").iterdir()) == []


async def test_what_a_crash_left_half_done_is_removed(images: LocalImages, layout: Layout, tmp_path: Path) -> None:
    from tests.images.builder import write_layout

    kept = await images.add(write_layout(tmp_path / "i.tar", simple(b"kept")), ignore)
    (layout.layers / ".new-abc" / "content").mkdir(parents=True)
    (layout.layers / ".old-abc").mkdir()
    (layout.oci / "work" / "work-abc").mkdir()
    (layout.layers / ("0" * 64)).mkdir()  # renamed, and its record lost with the power
    record = next((layout.oci / "images").iterdir())
    record.rename(record.with_suffix(".gone"))
    half = layout.oci / "partial" / ("1" * 64)
    half.write_bytes(b"half")
    (layout.oci / "images" / ".draft.json.1.2").write_text("{")
    next_daemon = LocalImages(layout, store=Store(layout, fresh=0))
    assert await next_daemon.find(kept.digest) == kept, "a sandbox may be made of it"
    await next_daemon.retain([kept.digest])
    assert [path.suffix for path in (layout.oci / "images").iterdir()] == [".json"]
    assert [path.name for path in layout.layers.iterdir()] == [
        path.name for path in images.store.layers_of(kept.digest)
    ]
    assert list((layout.oci / "work").iterdir()) == []
    assert await next_daemon.list() == [kept]
