"""agentkernel's tools as its documentation has them, and those of them that k8e lists as well. Plain data, no SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from k8e.doors.mcp.tools.schemas import (
    CONTENT,
    CONTENT_TO_WRITE,
    CREATED,
    CWD,
    ENV,
    FILE_OUTPUTS,
    MAX_OUTPUT,
    MODE,
    NETWORK,
    NOTES,
    OK,
    PATH,
    PROFILE,
    READ_AS,
    RUN_OPTIONAL,
    RUN_OUTPUTS,
    WRITTEN,
    WRITTEN_AS,
    Schema,
    ToolText,
    number,
    text,
    texts,
)

SANDBOX: Final = text("Which sandbox.")
TIMEOUT_MS: Final = number("Milliseconds until the command and everything it started is ended.", default=30000)
STATE: Final[Mapping[str, Schema]] = {
    "name": text("Its name for all other tools."),
    "state": text("What it is at.", enum=["starting", "running", "stopping", "stopped"]),
}
SANDBOXES: Final[Mapping[str, Schema]] = {
    "sandboxes": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                **STATE,
                "image": {"type": "string"},
                "profile": {"type": "string"},
                "mode": {"type": "string"},
                "runtime": {"type": "string"},
            },
            "required": ["name", "state", "image", "runtime"],
        },
    },
}

CREATE: Final = ToolText(
    "sandbox_create",
    "Create a sandbox by name",
    "Makes and starts a sandbox that can be stopped and started again on its own files.",
    {
        "name": text("1 to 63 of A-Z a-z 0-9 _ -."),
        "image": text("What its file system is made of, such as python:3.12-alpine; host: this machine's own tools."),
        "profile": PROFILE,
        "compatibility_mode": MODE,
        "network": NETWORK,
    },
    ("name",),
    outputs={**STATE, **CREATED},
    optional=NOTES,
    reaches=True,
)
START: Final = ToolText(
    "sandbox_start",
    "Start a sandbox",
    "Starts a sandbox that was stopped, on its own files.",
    {"name": SANDBOX},
    ("name",),
    outputs=STATE,
    repeats=True,
)
STOP: Final = ToolText(
    "sandbox_stop",
    "Stop a sandbox",
    "Ends everything that runs in a sandbox, and keeps its files.",
    {"name": SANDBOX},
    ("name",),
    outputs=STATE,
    destroys=True,
    repeats=True,
)
REMOVE: Final = ToolText(
    "sandbox_remove",
    "Remove a sandbox",
    "Ends a sandbox with all that runs in it and all its files.",
    {"name": SANDBOX},
    ("name",),
    outputs=OK,
    destroys=True,
    repeats=True,
)

KERNEL_TOOLS: Final[tuple[ToolText, ...]] = (
    ToolText(
        "sandbox_run",
        "Run a command in a temporary sandbox",
        "Runs a command, without a shell, in a sandbox that is made for it and gone afterwards. Which image fits is "
        "found by the command, unless one is asked for. If `denied` is not empty, the network refused something: its "
        "hint says what to ask for.",
        {
            "command": texts("The command and its arguments; for a script: ['sh', '-c', '...'].", minItems=1),
            "profile": PROFILE,
            "compatibility_mode": MODE,
            "network": NETWORK,
            "cwd": CWD,
            "env": ENV,
            "timeout_ms": TIMEOUT_MS,
            "image": text("What its file system is made of, such as node:22-alpine; host: this machine's own tools."),
            "max_output": MAX_OUTPUT,
        },
        ("command",),
        outputs=RUN_OUTPUTS,
        optional={**RUN_OPTIONAL, **NOTES},
        destroys=True,
        reaches=True,
    ),
    CREATE,
    ToolText(
        "sandbox_exec",
        "Run a command in a sandbox",
        "Runs a command in a sandbox that is there, and waits for it.",
        {
            "name": SANDBOX,
            "command": texts("The command and its arguments.", minItems=1),
            "cwd": CWD,
            "env": ENV,
            "timeout_ms": TIMEOUT_MS,
            "max_output": MAX_OUTPUT,
        },
        ("name", "command"),
        outputs=RUN_OUTPUTS,
        optional=RUN_OPTIONAL,
        destroys=True,
        reaches=True,
    ),
    ToolText("sandbox_list", "List sandboxes", "The sandboxes that are yours.", outputs=SANDBOXES, reads=True),
    REMOVE,
    ToolText(
        "sandbox_file_write",
        "Write a file into a sandbox",
        "Writes a file into a running sandbox. Missing directories are made.",
        {
            "name": SANDBOX,
            "path": PATH,
            "content": CONTENT_TO_WRITE,
            "encoding": WRITTEN_AS,
        },
        ("name", "path", "content"),
        outputs=WRITTEN,
        destroys=True,
        repeats=True,
    ),
    ToolText(
        "sandbox_file_read",
        "Read a file from a sandbox",
        "Reads any file as data: text, or base64 where that is asked for or the file is not UTF-8.",
        {
            "name": SANDBOX,
            "path": PATH,
            "encoding": READ_AS,
        },
        ("name", "path"),
        outputs={**FILE_OUTPUTS, "content": CONTENT},
        reads=True,
    ),
    START,
    STOP,
)
