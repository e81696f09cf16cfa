"""The controls that isolate a sandbox, each with a check that tries to get past it.

A check returns what it saw. It raises `Broken` when the control does not hold and `Untested` when it does not apply.
Any other failure counts as broken as well: a control that could not be seen to hold is none.
"""

from __future__ import annotations

from k8e.engine.local.doctor.controls import limits, network, privileges, surface
from k8e.engine.local.doctor.controls.control import Broken, Control, Untested

__all__ = ["CONTROLS", "Broken", "Control", "Untested"]

_CONTROLLERS = "the kernel's controller for it is off: see /proc/cgroups, and cgroup_enable= on its command line"
_PASSING = (
    "let the machine forward: the chains named above need a rule that accepts what comes from and goes to k8e-* "
    "(Docker: in its chain DOCKER-USER; ufw: `ufw route allow`)"
)

CONTROLS: tuple[Control, ...] = (
    Control("host files", "searched for files that were planted on the machine", surface.find_host_files),
    Control("mounts", "compared the mount table, wrote to shared folders", surface.compare_mounts),
    Control("host processes", "looked for a process of the machine in /proc", surface.find_host_processes),
    Control("network interfaces", "read /proc/net/dev", network.list_interfaces),
    Control("host loopback", "connected to a listener on 127.0.0.1 of the machine", network.reach_host_loopback),
    Control(
        "listed host",
        "reached a host behind a wire, by name, before and after it was listed",
        network.reach_remote_host,
        _PASSING,
    ),
    Control("unlisted names", "asked for a name that is not listed", network.ask_for_unlisted_name),
    Control("metadata", "connected to the address of cloud metadata", network.reach_metadata),
    Control("machine's services", "connected to a listener on an address of the machine", network.reach_machine),
    Control("devices", "compared /dev, tried mknod", surface.compare_devices),
    Control("kernel settings", "wrote to /proc/sys", surface.change_kernel_settings),
    Control("capabilities", "read a command's own, as user and as root", privileges.read_capabilities),
    Control("no new privileges", "ran a set-uid program of root's", privileges.gain_privileges),
    Control(
        "system call filter",
        "read its state, tried what it forbids",
        privileges.inspect_filter,
        "use a runc with seccomp",
    ),
    Control("user namespace", "read the id mapping, inside and outside", privileges.read_id_mapping),
    Control("CPU limit", "ran a busy loop, read the throttling counter", limits.exhaust_cpu, _CONTROLLERS),
    Control("open files limit", "read the hard limit", limits.read_file_limit),
    Control("timeouts", "let a command with runaway children run too long", limits.outlive_timeout),
    Control("disk limit", "wrote more than fits", limits.exhaust_disk),
    Control("process limit", "started too many commands", limits.exhaust_processes, _CONTROLLERS),
    Control("memory limit", "used twice the memory, watched for the kill", limits.exhaust_memory, _CONTROLLERS),
)
