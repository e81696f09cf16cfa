"""The one thing that is changed about the machine itself, and that it is as before afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from k8e.engine import EngineError
from k8e.engine.local.network import ip_forward


def read(settings: Path) -> dict[str, str]:
    return {str(path.relative_to(settings)): path.read_text() for path in settings.rglob("*") if path.is_file()}


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    top = tmp_path / "net"
    values = {
        "ipv4/ip_forward": "0",
        "ipv6/conf/all/forwarding": "0",
        "ipv6/conf/all/accept_ra": "1",
        "ipv6/conf/default/accept_ra": "1",
        "ipv6/conf/eth0/accept_ra": "1",
        "ipv6/conf/eth1/accept_ra": "0",
        "ipv6/conf/lo/accept_ra": "1",
        "ipv6/conf/k8e-3/accept_ra": "1",
    }
    for name, value in values.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(value)
    return top


def test_a_machine_forwards_and_still_hears_its_router(settings: Path, tmp_path: Path) -> None:
    before = read(settings)
    memory = tmp_path / "memory"
    ip_forward.switch_on(memory, settings)
    after = read(settings)
    changed = {name: value for name, value in after.items() if value != before[name]}
    assert changed == {
        "ipv4/ip_forward": "1",
        "ipv6/conf/all/forwarding": "1",
        "ipv6/conf/default/accept_ra": "2",
        "ipv6/conf/eth0/accept_ra": "2",
    }
    ip_forward.switch_on(memory, settings)
    ip_forward.restore(memory, settings)
    assert read(settings) == before
    assert not memory.exists()


def test_what_was_so_before_stays_so(settings: Path, tmp_path: Path) -> None:
    (settings / "ipv4/ip_forward").write_text("1")
    (settings / "ipv6/conf/all/forwarding").write_text("1")
    before = read(settings)
    ip_forward.switch_on(tmp_path / "memory", settings)
    ip_forward.restore(tmp_path / "memory", settings)
    assert read(settings) == before


def test_the_first_memory_counts(settings: Path, tmp_path: Path) -> None:
    """It is switched off in between: our own 1 is not what was there before."""
    memory = tmp_path / "memory"
    before = read(settings)
    ip_forward.switch_on(memory, settings)
    (settings / "ipv4/ip_forward").write_text("0")
    ip_forward.switch_on(memory, settings)
    ip_forward.restore(memory, settings)
    assert read(settings) == before


def test_a_machine_without_ipv6(tmp_path: Path) -> None:
    (tmp_path / "net/ipv4").mkdir(parents=True)
    (tmp_path / "net/ipv4/ip_forward").write_text("0")
    ip_forward.switch_on(tmp_path / "memory", tmp_path / "net")
    assert (tmp_path / "net/ipv4/ip_forward").read_text() == "1"


def test_what_cannot_be_switched_on_refuses(settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def refuse(path: Path, text: str) -> int:
        if path.name == "ip_forward":
            raise PermissionError(13, "Permission denied")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(EngineError) as raised:
        ip_forward.switch_on(tmp_path / "memory", settings)
    assert raised.value.control == "network forwarding"


def test_the_real_thing(machine: None, tmp_path: Path) -> None:
    files = [Path("/proc/sys/net/ipv4/ip_forward"), Path("/proc/sys/net/ipv6/conf/all/forwarding")]
    before = [file.read_text() for file in files]
    ip_forward.switch_on(tmp_path / "memory")
    assert [file.read_text() for file in files] == ["1\n", "1\n"]
    ip_forward.restore(tmp_path / "memory")
    assert [file.read_text() for file in files] == before
