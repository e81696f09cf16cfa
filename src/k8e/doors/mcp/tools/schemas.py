"""How a tool is described, and what more than one tool takes or gives. Plain data, no SDK.

Input schemas are closed and flat: some clients refuse alternatives at the top level, so what excludes what is said in
the descriptions and checked when a tool is called. Output schemas name what is always there and leave room for more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from k8e.core.model import OUTPUT_LIMIT

DEFAULT_OUTPUT: Final = 16 << 10  # bytes of each stream: a model reads all of them

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
PARENT: Final = text("Whose workspace it shares. Left out: your own default session, made when it is first needed.")
NAME: Final = text("The same as session_id, by its other name.")
TIMEOUT: Final = number("Seconds until the command and everything it started is ended.", default=30)
MAX_OUTPUT: Final = {
    "type": "integer",
    "description": "Bytes of each stream that the result may have: its beginning and its end. `rest` says how to get "
    "what is left out.",
    "default": DEFAULT_OUTPUT,
    "minimum": 2,
    "maximum": OUTPUT_LIMIT,
}
PATH: Final = text("Where in the sandbox; relative ones begin at /workspace.")
CONTENT_TO_WRITE: Final = text("What to write.")
WRITTEN_AS: Final = text("How content is written here.", enum=["utf-8", "base64"], default="utf-8")
READ_AS: Final = text("base64: never as text.", enum=["utf-8", "base64"], default="utf-8")
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
    "status": text("How it ended.", enum=["running", "completed", "timed_out", "killed", "oom_killed", "lost"]),
    "exit_code": {"type": ["integer", "null"], "description": "128+n for a signal, 124 for a timeout, null: unknown."},
    "stdout": text("Text; the exact bytes are beside it where they are not UTF-8."),
    "stderr": text("As stdout."),
    "session_id": text("Where it ran."),
    "run_id": text("The run's own name."),
    "duration_ms": COUNT,
    "truncated": {"type": "boolean", "description": "Something of the middle is left out; a line there says how much."},
    "stdout_bytes": COUNT,
    "stderr_bytes": COUNT,
    "denied": DENIED,
}
EMULATED: Final[Mapping[str, Schema]] = {
    "emulated": {
        "type": "boolean",
        "description": "A virtual machine without the processor's help: everything takes some ten times longer.",
    },
}
RUN_OPTIONAL: Final[Mapping[str, Schema]] = {
    **EMULATED,
    "stdout_base64": text("The exact bytes, where they are not UTF-8."),
    "stderr_base64": text("The exact bytes, where they are not UTF-8."),
    "denied_more": COUNT,
    "full_output": {
        "type": "object",
        "description": "Resources with all of a stream that was cut.",
        "additionalProperties": {"type": "string"},
    },
    "rest": text("How to get what was left out."),
    "figures": {**COUNT, "description": "How many figures follow as images."},
    "figures_left_out": {**COUNT, "description": "How many were shown besides, which are too many or too large."},
}
WRITTEN: Final[Mapping[str, Schema]] = {
    "ok": {"type": "boolean"},
    "path": text("As it was given."),
    "bytes": COUNT,
    "session_id": text("Where it was written."),
}
PART: Final[Mapping[str, Schema]] = {
    "offset": {"type": "integer", "description": "The byte to begin at.", "minimum": 0, "default": 0},
    "length": {"type": "integer", "description": "Bytes to read at most; 0: to the end.", "minimum": 0, "default": 0},
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
