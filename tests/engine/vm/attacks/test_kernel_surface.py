"""Everything that a kernel offers, tried on the guest's own: what its filter (agent/guest/filter.c), the missing
capabilities and the read-only settings leave of it is what the other runtimes leave."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from k8e.link.model import TerminalSize
from tests.engine.kernel_probe import ATTEMPTS
from tests.engine.rig import Room
from tests.engine.test_kernel_surface import (
    AGENT_MAY,
    WHO,
    allowed_errnos,
    run_probe,
    test_a_score_for_the_killer_is_not_one_of_the_host,
    test_commands_have_no_capability_at_all,
    test_gvisors_own_processes_run_under_a_filter,
    test_no_descriptor_of_the_agent_is_inherited,
    test_setuid_programs_change_nothing,
    test_signals_to_the_agent_gain_nothing,
    test_the_agent_has_no_capability_towards_the_kernel,
    test_the_keys_of_the_host_are_not_pressed,
    test_writing_settings_inside_changes_none_of_the_host,
)

__all__ = [
    "test_a_score_for_the_killer_is_not_one_of_the_host",
    "test_commands_have_no_capability_at_all",
    "test_gvisors_own_processes_run_under_a_filter",
    "test_no_descriptor_of_the_agent_is_inherited",
    "test_setuid_programs_change_nothing",
    "test_signals_to_the_agent_gain_nothing",
    "test_the_agent_has_no_capability_towards_the_kernel",
    "test_the_keys_of_the_host_are_not_pressed",
    "test_writing_settings_inside_changes_none_of_the_host",
]

# What else means no, here.
ALSO: Mapping[str, frozenset[str]] = {
    "write-/k8e-agent": frozenset({"ETXTBSY"}),  # it runs; besides, it is read-only
    "umount-/run/k8e": frozenset({"ENOENT"}),  # there is no such directory: the agent's socket is not in its root
    "process_mrelease-agent": frozenset({"EINVAL"}),  # it is not about to end
    "replace-by-syscall-info": frozenset({"EIO"}),  # a request that the guest's kernel does not have
}


@pytest.mark.parametrize("who", WHO)
async def test_denied(room: Room, who: str) -> None:
    results = await run_probe(room, who)
    assert set(results) == set(ATTEMPTS)
    done = {
        name: result
        for name, result in results.items()
        if result.get("errno") not in allowed_errnos(name) | ALSO.get(name, frozenset())
        and not (who == "agent" and name in AGENT_MAY and "done" in result)
    }
    assert done == {}


@pytest.mark.parametrize("who", WHO)
async def test_nothing_can_be_typed_into_a_terminal(room: Room, who: str) -> None:
    names = [name for name in ATTEMPTS if name.startswith("TIOC")]
    results = await run_probe(room, who, *names, terminal=TerminalSize())
    assert len(results) == len(names)
    assert {name for name, result in results.items() if result.get("errno") not in allowed_errnos(name)} == set()
