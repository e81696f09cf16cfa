"""CNCF's conformance tests on a cluster of one's own: one server and one worker on machines made of namespaces.

run_conformance.py [--focus REGEX] [--skip REGEX] [--minutes 60] [--keep FILE]

The tests are those of Kubernetes' own module, in the version of the cluster. No image is pulled: agnhost is built from
the same module, busybox is this machine's own, and what wants another image fails, and is counted for that reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from k8e.cluster.build import build_tool, default_cache, find_components  # noqa: E402
from k8e.cluster.components import CONFORMANCE  # noqa: E402
from k8e.cluster.image import Image, make_archive, pack  # noqa: E402
from tests.members.conftest import Member  # noqa: E402
from tests.members.machine import make_segment  # noqa: E402

REGISTRY: Final = "registry.k8s.io"
NAME: Final = "[Conformance]"
PAUSE: Final = "pause:3.10.2"


def say(text: str) -> None:
    print(f"conformance: {text}", file=sys.stderr, flush=True)


def make_images(tools: Path) -> Iterator[bytes]:
    """The images that can be made here, under the names that the tests of this version ask for."""
    found = shutil.which("busybox")
    if found is None:
        raise SystemExit("conformance: the package busybox-static is missing: scripts/setup tests")
    names = subprocess.run([found, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{name}": "busybox" for name in names if name != "busybox"}
    accounts = {
        "etc/passwd": (b"root:x:0:0::/:/bin/sh\nuser-defined-in-image:x:1000:1000::/:/bin/sh\n", 0o644),
        "etc/group": (
            b"root:x:0:\nuser-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\n",
            0o644,
        ),
    }
    shell = {"bin/busybox": (Path(found).read_bytes(), 0o755), **accounts}
    agnhost = {"agnhost": ((tools / "agnhost").read_bytes(), 0o755), **shell}
    both = [pack(agnhost, {**links, "agnhost-2": "agnhost"})]
    machine = platform.machine()
    agnhost_image = Image(machine, both, ["/agnhost"], ["pause"])
    yield make_archive(f"{REGISTRY}/e2e-test-images/agnhost:2.63.0", [agnhost_image])
    yield make_archive(f"{REGISTRY}/{PAUSE}", [agnhost_image])
    yield make_archive(
        f"{REGISTRY}/e2e-test-images/busybox:1.37.0-1", [Image(machine, [pack(shell, links)], [], ["sh"])]
    )


def place(program: Path) -> Path:
    """Where the machines of a segment have what was built."""
    return Path("/run/binaries") / program.relative_to(default_cache())


def import_images(member: Member, archives: list[bytes], ctr: str) -> None:
    command = [ctr, "--address=/run/k8e/containerd/containerd.sock", "--namespace=k8s.io", "images", "import", "-"]
    for archive in archives:
        subprocess.run([*member.machine.enter(), *command], input=archive, check=True, capture_output=True)


def read_report(path: Path) -> list[dict[str, Any]]:
    """The tests of conformance in Ginkgo's report: those that ran, and those that were left out."""
    specs = [spec for suite in json.loads(path.read_text()) for spec in suite.get("SpecReports") or []]
    return [spec for spec in specs if spec["LeafNodeType"] == "It" and NAME in name_spec(spec)]


def name_spec(spec: dict[str, Any]) -> str:
    return " ".join([*(spec.get("ContainerHierarchyTexts") or []), spec["LeafNodeText"]])


def tell_reason(spec: dict[str, Any]) -> str:
    text = json.dumps(spec.get("Failure") or {}) + str(spec.get("CapturedGinkgoWriterOutput") or "")
    for pattern in (r"ErrImagePull|ImagePullBackOff|ErrImageNeverPull", r"Failed to pull image"):
        if re.search(pattern, text):
            return "an image that is not there"
    return "other"


def count(specs: list[dict[str, Any]]) -> dict[str, Any]:
    states = Counter(spec["State"] for spec in specs)
    failed = [spec for spec in specs if spec["State"] not in ("passed", "skipped", "pending")]
    groups: dict[str, Counter[str]] = {}
    for spec in specs:
        group = re.search(r"\[(sig-[a-z-]+)\]", name_spec(spec))
        groups.setdefault(group[1] if group else "", Counter())[spec["State"]] += 1
    return {
        "all": len(specs),
        "states": dict(states),
        "groups": {name: dict(found) for name, found in sorted(groups.items())},
        "failed": {name_spec(spec): tell_reason(spec) for spec in failed},
    }


def run_tests(server: Member, tools: Path, arguments: argparse.Namespace) -> Path:
    report = server.machine.folder / "state" / "conformance"
    command = [
        str(place(tools / "e2e.test")),
        *("--kubeconfig=/var/lib/k8e/k8e.yaml", "--provider=skeleton", "--report-dir=/var/lib/k8e/conformance"),
        *("--ginkgo.json-report=/var/lib/k8e/conformance/report.json", f"--ginkgo.timeout={arguments.minutes}m"),
        *(f"--ginkgo.focus={arguments.focus}", "--ginkgo.no-color", "--allowed-not-ready-nodes=0"),
        *([f"--ginkgo.skip={arguments.skip}"] if arguments.skip else []),
    ]
    report.mkdir(exist_ok=True)
    with open(report / "log", "wb") as log:
        subprocess.run([*server.machine.enter(), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    return report / "report.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--focus", default=re.escape(NAME))
    parser.add_argument("--skip", default="")
    parser.add_argument("--minutes", type=int, default=60, help="after which no further test begins")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "conformance.json")
    arguments = parser.parse_args()
    tools = build_tool(CONFORMANCE, default_cache(), say)
    folder = ROOT / "build" / "members-conformance"
    folder.mkdir(parents=True, exist_ok=True)
    with make_segment(folder) as segment:
        server = Member(segment.make("one"), "server")
        server.start()
        server.wait_ready()
        worker = Member(segment.make("two"), "worker")
        token = server.machine.run("cat", "/var/lib/k8e/server/node-token").stdout.strip()
        worker.start(K8E_URL=f"https://{server.machine.address}:6443", K8E_TOKEN=token)
        worker.wait_ready()
        archives = list(make_images(tools))
        components = find_components(default_cache())
        assert components is not None
        ctr = str(place(components.program("ctr")))
        for member in (server, worker):
            import_images(member, archives, ctr)
        say("the tests begin")
        report = run_tests(server, tools, arguments)
        shutil.copy(report.with_name("log"), arguments.keep.with_suffix(".log"))
        found = count(read_report(report))
    arguments.keep.write_text(json.dumps(found, indent=1))
    print(json.dumps({name: found[name] for name in ("all", "states", "groups")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
