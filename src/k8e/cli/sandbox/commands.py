"""The commands of `k8e sandbox`, and the options of each."""

from __future__ import annotations

from k8e.cli.command import Command, any_text
from k8e.cli.run import OPTIONS, RunOptions, read_timeout
from k8e.cli.values import read_range, read_size, read_span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.arguments import Table

# For commands about sessions: other sessions may have the same id.
OWNER: Table = {
    "--tenant-id": (any_text, "NAME", "the session of this tenant, where several have the id"),
    "--owner": (any_text, "UID", "the session of this owner: a user of the machine, or gateway"),
}
INTERACTIVE: Table = {
    "-i --interactive": (None, "", "as --stdin --raw: our standard input as it comes, and the output as it comes"),
}
SESSION: Table = {**OWNER, "sid": (str, "SID", "")}
FILE: Table = {**SESSION, "path": (str, "PATH", "relative ones begin at /workspace")}
RUN: Table = {"run_id": (str, "RUN-ID", "")}
DESTROY: Table = {
    **OWNER,
    "sid?": (str, "SID", "or --all"),
    "--all": (None, "", "all your sessions, also those of agentkernel; with --owner or --tenant-id those"),
    "--yes": (None, "", "do not ask; where there is no terminal it cannot be asked"),
}
COPY: Table = {
    **OWNER,
    "source": (str, "SRC", "a file or a folder: SID:PATH, or one of this machine"),
    "destination": (str, "DST", "the other side"),
}
HOSTS: Table = {
    **SESSION,
    "--add": (list, "HOSTS", "put these on the list"),
    "--remove": (list, "HOSTS", "take these off it; connections to them are cut"),
    "--hosts": (list, "HOSTS", "instead of the whole list"),
    "--clear": (None, "", "take everything off it"),
}
START: Table = {
    **SESSION,
    "--env": (
        list,
        "NAME=VALUE",
        "a variable for all its commands, new or changed; may be given several times",
    ),
    "--secret": (list, "NAME", "a variable with the value that it has here; may be given several times"),
}
SHELL: Table = {
    **SESSION,
    "--command": (str, "CMD", "run this instead of an interactive shell"),
    "--user": (str, "USER", "as this user of the sandbox, such as root or 1000; default: its own"),
    "--attach": (str, "RUN-ID", "this terminal, also if it is open elsewhere: it is taken over"),
    "--new": (None, "", "another terminal, though one was left running"),
}
CONFIRM: Table = {
    **SESSION,
    "action": (str, "ACTION", "what is to be done, for the person who decides"),
    "--timeout": (
        read_timeout,
        "TIME",
        "for how long it can be answered: 90, 90s, 15m; more than 0, at most 1d; default: 30",
    ),
    "--no-wait": (None, "", "print the approval's id at once"),
}
APPROVE: Table = {
    "approval_id": (str, "APPROVAL-ID", ""),
    "--key": (
        None,
        "",
        "as the API key of a person, typed at the terminal: if a program of root asks",
    ),
    "--reject": (None, "", "answer no"),
    "--reason": (any_text, "TEXT", "for the program that asked, and the audit log"),
}


def list_options(runtime: str, image: str, cpus: str, memory: str, disk: str, ttl: str, hosts: str) -> Table:
    """The options of `create` and `subagent` alike; the texts are their defaults."""
    hosts = f"what it may reach, instead of {hosts}: a.example,*.b.example:8443; '' is nothing"
    secret = "a variable with the value that it has here, which is kept on no disk; may be given several times"
    return {
        "--runtime": (str, "NAME", f"gvisor, native, kata or firecracker; default: {runtime}"),
        "--image": (str, "NAME", f"default: {image}"),
        "--session-id": (str, "SID", "the id to give it; default: chosen for you"),
        "--env": (list, "NAME=VALUE", "a variable for all its commands; may be given several times"),
        "--secret": (list, "NAME", secret),
        "--cpus": (float, "N", f"default: {cpus}"),
        "--memory": (read_size, "SIZE", f"such as 512m or 2g; default: {memory}"),
        "--disk": (read_size, "SIZE", f"default: {disk}"),
        "--ttl": (read_span, "TIME", f"unused for that long it is destroyed: 90s, 15m, 2d; default: {ttl}"),
        "--allowed-hosts": (list, "HOSTS", hosts),
    }


CREATE: Table = {
    **list_options(
        *("the strongest that works here", "host, this machine's own tools"),
        *("1", "1g", "2g", "1h", "the usual list"),
    ),
    "--tenant": (str, "NAME", "the tenant to which it belongs"),
    "--manifest": (str, "FILE", "YAML with files, directories and repositories to begin with"),
    "--git-repo": (str, "URL", "clone this into /workspace, under its own name"),
    "--git-ref": (str, "REF", "the branch, tag or commit of --git-repo"),
    "--persistent": (None, "", "it can be stopped and started, and does not end by itself"),
}
SAME = "its parent's"
CHILD: Table = {
    **OWNER,
    "parent": (str, "PARENT-SID", "the session whose workspace it shares"),
    **list_options(SAME, SAME, SAME, SAME, SAME, SAME, "all that its parent may"),
    "--agent-type": (str, "NAME", "what kind of agent it is for, as a label"),
    "--workspace-path": (str, "DIR", "where in /workspace its commands start; made when it is not there"),
    "--read-only": (None, "", "it sees the workspace and cannot change it"),
    "--powerless": (None, "", "not even its root has capabilities"),
}

SANDBOX = {
    "run": Command(
        "run code or a shell command",
        "run:run_parsed",
        {"code?": (str, "CODE", "default: standard input"), **OPTIONS, **INTERACTIVE},
        "manual:RUN",
        defaults=vars(RunOptions()),
    ),
    "shell": Command("open a shell in a session at this terminal", "sandbox.shell:shell", SHELL, "manual:SHELL"),
    "create": Command("make a session and print its id", "sandbox.sessions:create", CREATE),
    "subagent": Command(
        "make a session that shares another's workspace", "sandbox.sessions:subagent", CHILD, "manual:SUBAGENT"
    ),
    "get": Command("show a session", "sandbox.sessions:get", SESSION),
    "allow-hosts": Command(
        "show or change what a session may reach",
        "sandbox.sessions:allow_hosts",
        HOSTS,
        "manual:HOSTS",
        defaults={"add": None, "remove": None, "hosts": None},
    ),
    "sessions": Command(
        "list your sessions",
        "sandbox.sessions:list_sessions",
        {**OWNER, "--phase": (("active", "all"), "", "default: active")},
        defaults={"phase": "active"},
    ),
    "stop": Command("end what runs in a persistent session; its files stay", "sandbox.sessions:stop", SESSION),
    "start": Command("bring a stopped session back, with its files", "sandbox.sessions:start", START, "manual:START"),
    "destroy": Command("end a session with all that is in it", "sandbox.ends:destroy", DESTROY, "manual:DESTROY"),
    "write": Command(
        "write standard input to a file of a session",
        "sandbox.sessions:write",
        {**FILE, "--mode": (("w", "a"), "", "w replaces (default), a appends")},
        defaults={"mode": "w"},
    ),
    "read": Command(
        "read a file of a session",
        "sandbox.sessions:read",
        {
            **FILE,
            "--raw": (None, "", "print the bytes as they are instead of JSON, of a file of any size"),
            "--range": (read_range, "FIRST-LAST", "these bytes only, counted from 0: 0-99, or 100- to the end"),
        },
    ),
    "cp": Command("copy files and folders into a session, or out of it", "sandbox.files:copy", COPY, "manual:COPY"),
    "mkdir": Command("make a directory in a session", "sandbox.files:make_directory", FILE, "manual:MKDIR"),
    "rm": Command(
        "remove a file of a session",
        "sandbox.files:remove",
        {**FILE, "-r --recursive": (None, "", "a directory with everything in it")},
    ),
    "list": Command(
        "list the files of a session",
        "sandbox.sessions:list_files",
        {
            **SESSION,
            "--path": (str, "DIR", "default: /workspace"),
            "--since": (float, "TIME", "only what changed after (unix time)"),
        },
        defaults={"since": 0.0},
    ),
    "status": Command(
        "say whether sandboxes work, and which session is yours",
        "sandbox.sessions:status",
        {"--tenant": (str, "NAME", "the tenant whose session is yours, as for `run --tenant`")},
    ),
    "poll": Command("show how a background run is doing", "sandbox.sessions:poll", RUN),
    "logs": Command(
        "print what a background run has written",
        "sandbox.logs:print_output",
        {**RUN, "-f --follow": (None, "", "go on until it ends, and exit as it does")},
        "manual:LOGS",
    ),
    "kill": Command("end a background run", "sandbox.sessions:kill", RUN),
    "ps": Command("list the commands of a session", "sandbox.sessions:ps", SESSION),
    "log": Command("list the runs of a session", "sandbox.sessions:log", SESSION),
    "confirm": Command(
        "ask a person whether something may be done", "sandbox.approvals:confirm", CONFIRM, "manual:CONFIRM"
    ),
    "approve": Command("answer such a question", "sandbox.approvals:approve", APPROVE, "manual:APPROVE"),
    "approvals": Command(
        "list the questions that can be answered, or show one",
        "sandbox.approvals:list_approvals",
        {"approval_id?": (str, "APPROVAL-ID", ""), "--all": (None, "", "those that are settled, too")},
    ),
}
