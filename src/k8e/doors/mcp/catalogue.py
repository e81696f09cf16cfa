"""The tools as an agent sees them: names, titles, descriptions, schemas, hints. Plain data, no SDK.

Input schemas are closed and flat: some clients refuse alternatives at the top level, so what excludes what is said in
the descriptions and checked when a tool is called. Output schemas name what is always there and leave room for more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolText:
    """`reads` changes nothing; `destroys` may take something away; `repeats` is the same done twice; `reaches` may
    talk to the world outside."""

    name: str
    title: str
    description: str
    inputs: Mapping[str, Schema] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    outputs: Mapping[str, Schema] = field(default_factory=dict)
    optional: Mapping[str, Schema] = field(default_factory=dict)
    reads: bool = False
    destroys: bool = False
    repeats: bool = False
    reaches: bool = False

    @property
    def input_schema(self) -> Schema:
        schema: Schema = {"type": "object", "properties": dict(self.inputs), "additionalProperties": False}
        return {**schema, "required": list(self.required)} if self.required else schema

    @property
    def output_schema(self) -> Schema:
        properties = {**self.outputs, **self.optional}
        return {"type": "object", "properties": properties, "required": list(self.outputs)}


def text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def number(description: str, **more: Any) -> Schema:
    return {"type": "number", "description": description, **more}


def texts(description: str, **more: Any) -> Schema:
    return {"type": "array", "items": {"type": "string"}, "description": description, **more}


SESSION: Final = text("Which session. Left out: your own default session, made when it is first needed.")
NAME: Final = text("The same as session_id, by its other name.")
TIMEOUT: Final = number("Seconds until the command and everything it started is ended.", default=30)
MAX_OUTPUT: Final = {
    "type": "integer",
    "description": "Bytes of each stream that the result may have: its beginning and its end. The rest is a resource.",
    "default": 1 << 20,
    "minimum": 2,
    "maximum": 1 << 20,
}
PATH: Final = text("Where in the sandbox; relative ones begin at /workspace.")
COUNT: Final = {"type": "integer", "minimum": 0}

DENIED: Final = {
    "type": "array",
    "description": "What the network refused to the command, why, and what to ask for.",
    "items": {
        "type": "object",
        "properties": {
            "host": {"type": "string"},
            "address": {"type": "string"},
            "port": {"type": "integer"},
            "reason": {"type": "string"},
            "hint": {"type": "string"},
        },
        "required": ["host", "port", "reason", "hint"],
    },
}
RUN_OUTPUTS: Final[Mapping[str, Schema]] = {
    "stdout": text("Text; the exact bytes are beside it where they are not UTF-8."),
    "stderr": text("As stdout."),
    "exit_code": {"type": ["integer", "null"], "description": "128+n for a signal, 124 for a timeout, null: unknown."},
    "session_id": text("Where it ran."),
    "run_id": text("The run's own name."),
    "status": text("How it ended.", enum=["running", "completed", "timed_out", "killed", "oom_killed", "lost"]),
    "duration_ms": COUNT,
    "truncated": {"type": "boolean", "description": "Something of the middle is missing."},
    "stdout_bytes": COUNT,
    "stderr_bytes": COUNT,
    "denied": DENIED,
}
RUN_OPTIONAL: Final[Mapping[str, Schema]] = {
    "stdout_base64": text("The exact bytes, where they are not UTF-8."),
    "stderr_base64": text("The exact bytes, where they are not UTF-8."),
    "denied_more": COUNT,
    "full_output": {
        "type": "object",
        "description": "Resources with all of a stream that was truncated.",
        "additionalProperties": {"type": "string"},
    },
}
WRITTEN: Final[Mapping[str, Schema]] = {
    "ok": {"type": "boolean"},
    "path": text("As it was given."),
    "bytes": COUNT,
    "session_id": text("Where it was written."),
}
CONTENT: Final = text("Text, or base64 where the file is not UTF-8; an image comes beside it and not in it.")
FILE_OUTPUTS: Final[Mapping[str, Schema]] = {
    "path": text("As it was asked for."),
    "encoding": text("How content is to be read.", enum=["utf-8", "base64"]),
    "bytes": COUNT,
    "session_id": text("Where it was read."),
}
OK: Final[Mapping[str, Schema]] = {"ok": {"type": "boolean"}}
CREATED: Final[Mapping[str, Schema]] = {
    "session_id": text("Its name for all other tools."),
    "runtime": text("What isolates it."),
    "policy": {"type": "object", "description": "What is in force: image, limits, ttl, allowed_hosts."},
}

CODE: Final = text("What to run, exactly as written. Either this or command.")
LANGUAGE: Final = text("Of code.", enum=["python", "bash", "node", "ts"], default="bash")
ARGV: Final = texts("A command and its arguments, run without a shell in a temporary sandbox. Either this or code.")
COMMAND: Final = {
    "type": ["string", "array"],
    "items": {"type": "string"},
    "description": "A line for bash, or a command and its arguments for no shell at all.",
}
ENV: Final = {
    "type": "object",
    "additionalProperties": {"type": "string"},
    "description": "Variables for this command.",
}
CWD: Final = text("The directory to run in.", default="/workspace")
RUNTIMES: Final = ["gvisor", "native", "kata", "firecracker"]
HOSTS: Final = texts(
    "What it may reach, instead of the usual list: example.com, *.example.com, example.com:8443, 192.0.2.0/24. "
    "An empty list is nothing."
)
IMAGE: Final = text("What the sandbox's file system is made of; host is this machine's own tools.", default="host")

PROFILE: Final = text(
    "What it may. restrictive: no network, nothing but /tmp can be written, no capabilities. moderate: the network, no "
    "folder of the machine. permissive: the project's folder, the home and the variables too, where this server was "
    "started with --allow-permissive.",
    enum=["restrictive", "moderate", "permissive"],
)
MODE: Final = text(
    "As an agent of that kind needs it. native: the network. claude, codex, gemini: the package registries and the "
    "agent's own interface, with the project's folder at /workspace; codex can write nothing else.",
    enum=["native", "claude", "codex", "gemini"],
)
NETWORK: Final[Schema] = {"type": "boolean", "description": "Whether it has one, instead of what the profile says."}
NOTES: Final[Mapping[str, Schema]] = {"notes": texts("What was done otherwise than asked for, and why.")}

EXEC_INPUTS: Final[Mapping[str, Schema]] = {
    "session_id": SESSION,
    "name": NAME,
    "command": COMMAND,
    "timeout": TIMEOUT,
    "workdir": CWD,
    "env": ENV,
    "max_output": MAX_OUTPUT,
}

TOOLS: Final[tuple[ToolText, ...]] = (
    ToolText(
        "sandbox_run",
        "Run code in a sandbox",
        "Run code or a command, isolated from the machine. With `code`: in your own session, which is made when there "
        "is none, so that files and installed packages are there at the next call. With `command` (a list): in a "
        "temporary sandbox, with profile, compatibility_mode, network and image, unless session_id names a session. "
        "If `denied` is not empty, the network refused something: its hint says what to ask for.",
        {
            "code": CODE,
            "language": LANGUAGE,
            "timeout": TIMEOUT,
            "session_id": SESSION,
            "command": ARGV,
            "profile": PROFILE,
            "compatibility_mode": MODE,
            "network": NETWORK,
            "cwd": CWD,
            "env": ENV,
            "timeout_ms": number("As timeout, in milliseconds.", default=30000),
            "image": IMAGE,
            "max_output": MAX_OUTPUT,
        },
        outputs=RUN_OUTPUTS,
        optional={**RUN_OPTIONAL, **NOTES},
        destroys=True,
        reaches=True,
    ),
    ToolText(
        "sandbox_status",
        "Is the sandbox service there",
        "Whether sandboxes work here, and which session is yours (null: none was needed so far).",
        outputs={
            "available": {"type": "boolean"},
            "session_id": {"type": ["string", "null"]},
            "runtime": {"type": ["string", "null"]},
            "version": {"type": "string"},
            "warm": COUNT,
        },
        reads=True,
    ),
    ToolText(
        "sandbox_create_session",
        "Create a session",
        "A sandbox of its own, with a runtime and a list of hosts of its own. It ends with this connection, unless "
        "tenant_id names a tenant that keeps it.",
        {
            "session_id": text("The name to give it; left out: chosen for you."),
            "tenant_id": text("Whom it belongs to."),
            "runtime_class": text("What isolates it; left out: the strongest that works here.", enum=RUNTIMES),
            "allowed_hosts": HOSTS,
        },
        outputs=CREATED,
    ),
    ToolText(
        "sandbox_destroy_session",
        "Destroy a session",
        "Ends a session with all that runs in it and all its files.",
        {"session_id": text("Which session.")},
        ("session_id",),
        outputs=OK,
        destroys=True,
        repeats=True,
    ),
    ToolText(
        "sandbox_exec",
        "Run a command in a session",
        "Runs a command in a session that is there, and waits for it.",
        EXEC_INPUTS,
        ("command",),
        outputs=RUN_OUTPUTS,
        optional=RUN_OPTIONAL,
        destroys=True,
        reaches=True,
    ),
    ToolText(
        "sandbox_exec_stream",
        "Run a command and follow its output",
        "As sandbox_exec; while it runs, progress notifications carry the latest of its output.",
        EXEC_INPUTS,
        ("command",),
        outputs=RUN_OUTPUTS,
        optional=RUN_OPTIONAL,
        destroys=True,
        reaches=True,
    ),
    ToolText(
        "sandbox_write_file",
        "Write a file",
        "Writes a file into a session. Missing directories are made.",
        {
            "session_id": SESSION,
            "path": PATH,
            "content": text("What to write."),
            "mode": text("w replaces, a appends.", enum=["w", "a"], default="w"),
            "encoding": text("How content is written here.", enum=["utf-8", "base64"], default="utf-8"),
        },
        ("path", "content"),
        outputs=WRITTEN,
        destroys=True,
    ),
    ToolText(
        "sandbox_read_file",
        "Read a file",
        "Reads a file of a session. PNG, JPEG, GIF and WebP come as images.",
        {"session_id": SESSION, "path": PATH},
        ("path",),
        outputs=FILE_OUTPUTS,
        optional={"content": CONTENT, "mime_type": text("Of an image.")},
        reads=True,
    ),
    ToolText(
        "sandbox_list_files",
        "List files",
        "Lists what is below a directory of a session and was modified since a point in time.",
        {
            "session_id": SESSION,
            "since": number("Unix seconds.", default=0),
            "path": text("Below which directory.", default="/workspace"),
        },
        outputs={
            "files": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string"},
                        "modified": {"type": "number"},
                        "type": {"type": "string"},
                        "size": COUNT,
                    },
                    "required": ["path", "modified", "type", "size"],
                },
            },
            "session_id": text("Where."),
        },
        reads=True,
    ),
    ToolText(
        "sandbox_pip_install",
        "Install Python packages",
        "Installs packages with pip into a session.",
        {"session_id": SESSION, "packages": texts("Requirements such as requests or requests>=2.", minItems=1)},
        ("packages",),
        outputs={"output": text("What pip printed."), "exit_code": RUN_OUTPUTS["exit_code"], "denied": DENIED},
        optional={
            name: schema for name, schema in {**RUN_OUTPUTS, **RUN_OPTIONAL}.items() if not name.startswith("std")
        },
        repeats=True,
        reaches=True,
    ),
    ToolText(
        "sandbox_run_subagent",
        "Make a session for a sub-agent",
        "A sandbox of its own for work beside yours: it shares /workspace with its parent, live in both directions, "
        "and has its own processes, /tmp, variables and limits. It can do nothing that its parent cannot, has no "
        "sub-agents itself, and ends with its parent. Use its session_id with the other tools.",
        {
            "parent_session_id": text(
                "Whose workspace it shares. Left out: your own default session, made when it is first needed."
            ),
            "agent_type": text("What kind of agent it is for: a label of letters, digits, _ and -."),
            "workspace_path": text(
                "The directory in /workspace where its commands start; made when it is not there.", default="/workspace"
            ),
        },
        outputs={**CREATED, "parent_session_id": text("Whose child it is.")},
    ),
    ToolText(
        "sandbox_confirm_action",
        "Ask a person",
        "Before something that cannot be undone: asks a person to approve it. With `action` it asks; if the answer is "
        "pending, call it again with `approval_id` until approved is true, or status says that it was not.",
        {
            "session_id": SESSION,
            "action": text("What is to be done, in words that a person can judge."),
            "approval_id": text("A question that was asked before."),
            "timeout": number("Seconds to wait for the answer to approval_id; 300 at most.", default=20),
        },
        outputs={
            "approval_id": text("By which the answer is heard."),
            "approved": {"type": "boolean"},
            "status": text("What became of it.", enum=["pending", "approved", "rejected", "expired", "withdrawn"]),
        },
        optional={"hint": text("How a person answers."), "reason": text("Why."), "expires_at": {"type": "number"}},
        reaches=True,
    ),
    ToolText(
        "sandbox_list",
        "List sandboxes",
        "The sessions that are yours.",
        outputs={"sessions": {"type": "array", "items": {"type": "object"}}},
        reads=True,
    ),
    ToolText(
        "sandbox_remove",
        "Remove a sandbox",
        "The same as sandbox_destroy_session, by its other name.",
        {"name": text("Which session.")},
        ("name",),
        outputs=OK,
        destroys=True,
        repeats=True,
    ),
    ToolText(
        "sandbox_file_write",
        "Write a file into a sandbox",
        "The same as sandbox_write_file, by its other name.",
        {
            "name": SESSION,
            "path": PATH,
            "content": text("What to write."),
            "encoding": text("How content is written here.", enum=["utf-8", "base64"], default="utf-8"),
        },
        ("path", "content"),
        outputs=WRITTEN,
        destroys=True,
        repeats=True,
    ),
    ToolText(
        "sandbox_file_read",
        "Read a file from a sandbox",
        "Reads any file of a session as data: text, or base64 where that is asked for or the file is not UTF-8.",
        {
            "name": SESSION,
            "path": PATH,
            "encoding": text("base64: never as text.", enum=["utf-8", "base64"], default="utf-8"),
        },
        ("path",),
        outputs={**FILE_OUTPUTS, "content": CONTENT},
        reads=True,
    ),
)
