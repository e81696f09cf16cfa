"""scripts/install.sh: from a folder or an address that is named, compared by hash, and taken back again."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8e.cluster.image import pack
from k8e.cluster.programs import write_sums
from tests.members.commands import K8E
from tests.members.conftest import ROOT
from tests.members.machine import ENVIRONMENT, Machine, Segment, make_segment

HOME = "/usr/local/lib/k8e-cluster"
UNIT = "/etc/systemd/system/k8e.service"
TOKEN = f"K8E1{'ab' * 32}::abcdef.0123456789abcdef"


@pytest.fixture(scope="module")
def segment() -> Iterator[Segment]:
    folder = ROOT / "build" / "members-install"
    folder.mkdir(parents=True, exist_ok=True)
    with make_segment(folder) as found:
        yield found


@pytest.fixture
def machine(segment: Segment) -> Machine:
    """One with nothing on it."""
    return segment.make(f"m{len(segment.machines)}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A release folder whose program is this checkout's."""
    folder = ROOT / "build" / "members-install" / f"source-{tmp_path.name}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "images").mkdir(parents=True)
    script = f'#!/bin/sh\nexec {K8E} "$@"\n'.encode()
    (folder / "k8e.tar.gz").write_bytes(gzip.compress(pack({"k8e/bin/k8e": (script, 0o755)}, {})))
    (folder / "kubelet").write_bytes(b"the kubelet")
    (folder / "images" / "sandbox.oci.tar").write_bytes(b"an image")
    write_sums(folder)
    return folder


def install(machine: Machine, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*machine.enter(), "/bin/sh", str(ROOT / "scripts" / "install.sh")]
    return subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, **variables}, timeout=120)


def is_untouched(machine: Machine) -> bool:
    found = machine.run("ls", "-d", HOME, UNIT, "/usr/local/bin/k8e", "/etc/k8e", check=False)
    left = machine.run("sh", "-c", f"ls -d {HOME}* 2>/dev/null || true").stdout
    return found.stdout == "" and left == ""


def read_unit(machine: Machine) -> str:
    return next(line for line in machine.run("cat", UNIT).stdout.splitlines() if line.startswith("ExecStart="))


def test_a_server_is_the_default_and_uninstall_takes_everything_back(machine: Machine, source: Path) -> None:
    done = install(machine, INSTALL_K8E_SOURCE=str(source))
    assert done.returncode == 0, done.stderr
    assert read_unit(machine) == "ExecStart=/usr/local/bin/k8e server --cluster"
    assert machine.run("/usr/local/bin/k8e", "--version").stdout.startswith("k8e ")
    assert machine.run("cat", f"{HOME}/kubelet", f"{HOME}/images/sandbox.oci.tar").stdout == "the kubeletan image"
    if shutil.which("systemd-analyze"):
        machine.run("systemd-analyze", "verify", UNIT)
    machine.run("/usr/local/bin/k8e", "cluster", "uninstall", "--yes")
    machine.run("sh", "-c", "rmdir /etc/k8e")  # settings may be there, so it is left; it is empty
    assert is_untouched(machine)


def test_a_worker_gets_its_variables_in_a_file_of_root(machine: Machine, source: Path) -> None:
    variables = {"K8E_URL": "https://192.0.2.1:6443", "K8E_TOKEN": TOKEN}
    done = install(machine, INSTALL_K8E_SOURCE=str(source), **variables)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr + machine.run("cat", UNIT).stdout
    assert read_unit(machine) == "ExecStart=/usr/local/bin/k8e agent"
    assert machine.run("cat", "/etc/k8e/cluster.env").stdout.split() == [f"{n}={v}" for n, v in variables.items()]
    assert machine.run("stat", "-c", "%a %u", "/etc/k8e/cluster.env").stdout.split() == ["600", "0"]
    # An upgrade without variables keeps them; what the service runs is said again.
    assert install(machine, INSTALL_K8E_SOURCE=str(source), INSTALL_K8E_EXEC="agent").returncode == 1
    machine.run("mkdir", "-p", "/var/lib/k8e/agent")
    machine.run("touch", "/var/lib/k8e/agent/membership.json")
    assert install(machine, INSTALL_K8E_SOURCE=str(source)).returncode == 0
    assert read_unit(machine) == "ExecStart=/usr/local/bin/k8e agent"
    assert TOKEN in machine.run("cat", "/etc/k8e/cluster.env").stdout


def test_options_of_the_server_are_taken_over(machine: Machine, source: Path) -> None:
    words = "server --disable-sandbox-matrix"
    assert install(machine, INSTALL_K8E_SOURCE=str(source), INSTALL_K8E_EXEC=words).returncode == 0
    assert read_unit(machine) == "ExecStart=/usr/local/bin/k8e server --cluster --disable-sandbox-matrix"


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"INSTALL_K8E_SOURCE": ""}, "INSTALL_K8E_SOURCE is not set"),
        ({"INSTALL_K8E_SOURCE": "http://192.0.2.1"}, "can be changed on the way"),
        ({"INSTALL_K8E_SOURCE": "relative"}, "neither an absolute path nor an address"),
        ({"INSTALL_K8E_SHA256": "0" * 64}, "not the one that INSTALL_K8E_SHA256 names"),
        ({"INSTALL_K8E_EXEC": "agent"}, "a worker needs K8E_URL and K8E_TOKEN"),
        ({"INSTALL_K8E_EXEC": "server; reboot"}, "characters that a unit cannot have"),
        ({"INSTALL_K8E_EXEC": "sandbox run"}, "neither server nor agent"),
        ({"K8E_URL": "https://a\nExecStart=/bin/sh", "K8E_TOKEN": "x"}, "characters that a unit cannot have"),
    ],
)
def test_what_is_not_clear_is_refused(machine: Machine, source: Path, variables: dict[str, str], reason: str) -> None:
    done = install(machine, **{"INSTALL_K8E_SOURCE": str(source), **variables})
    assert (done.returncode, reason in done.stderr, "hint:" in done.stderr) == (1, True, True), done.stderr
    assert is_untouched(machine)


@pytest.mark.parametrize("damage", ["changed", "missing", "outside"])
def test_a_source_that_is_not_what_its_hashes_say_installs_nothing(machine: Machine, source: Path, damage: str) -> None:
    if damage == "changed":
        (source / "kubelet").write_bytes(b"another kubelet")
    elif damage == "missing":
        (source / "kubelet").unlink()
    else:
        with (source / "SHA256SUMS").open("a") as sums:
            sums.write(f"{'0' * 64}  ../../etc/passwd\n")
    done = install(machine, INSTALL_K8E_SOURCE=str(source))
    assert (done.returncode, "Nothing was installed" in done.stderr) == (1, True), done.stderr
    assert is_untouched(machine)


def test_an_address_is_used_with_the_hash_of_the_list(machine: Machine, source: Path) -> None:
    """In plain HTTP, from a server that is in the machine's network: the hash alone vouches for it."""
    script = f"import os; os.chdir({str(source)!r})\nfrom http.server import *\n"
    script += "ThreadingHTTPServer(('127.0.0.1', 8080), SimpleHTTPRequestHandler).serve_forever()"
    server = machine.start("/usr/bin/python3", "-c", script)
    machine.run(
        "sh", "-c", "until curl --silent --output /dev/null http://127.0.0.1:8080/SHA256SUMS; do sleep 0.1; done"
    )
    digest = hashlib.sha256((source / "SHA256SUMS").read_bytes()).hexdigest()
    where = {"INSTALL_K8E_SOURCE": "http://127.0.0.1:8080"}
    assert install(machine, **where, INSTALL_K8E_SHA256="1" * 64).returncode == 1
    assert is_untouched(machine)
    done = install(machine, **where, INSTALL_K8E_SHA256=digest)
    assert done.returncode == 0, done.stderr
    assert machine.run("cat", f"{HOME}/kubelet").stdout == "the kubelet"
    server.kill()


def test_a_program_that_is_not_ours_is_left_alone(machine: Machine, source: Path) -> None:
    machine.run("sh", "-c", "echo '#!/bin/sh' > /usr/local/bin/k8e")
    done = install(machine, INSTALL_K8E_SOURCE=str(source))
    assert (done.returncode, "not of this installer" in done.stderr) == (1, True)
    assert machine.run("cat", "/usr/local/bin/k8e").stdout == "#!/bin/sh\n"
