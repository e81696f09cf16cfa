"""agentkernel's tools as its documentation has them, and those of them that k8e lists as well. Plain data, no SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from k8e.doors.mcp.tools import schemas
from k8e.doors.mcp.tools.schemas import Schema, ToolText, number, text, texts

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
        "profile": schemas.PROFILE,
        "compatibility_mode": schemas.MODE,
        "network": schemas.NETWORK,
    },
    ("name",),
    outputs={**STATE, **schemas.CREATED},
    optional=schemas.NOTES,
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
    outputs=schemas.OK,
    destroys=True,
    repeats=True,
)

AGENTKERNEL_TOOLS: Final[tuple[ToolText, ...]] = (
    ToolText(
        "sandbox_run",
        "Run a command in a temporary sandbox",
        "Runs a command, without a shell, in a sandbox that is made for it and gone afterwards. Which image fits is "
        "found by the command, unless one is asked for. If `denied` is not empty, the network refused something: its "
        "hint says what to ask for.",
        {
            "command": texts("The command and its arguments; for a script: ['sh', '-c', '...'].", minItems=1),
            "profile": schemas.PROFILE,
            "compatibility_mode": schemas.MODE,
            "network": schemas.NETWORK,
            "cwd": schemas.CWD,
            "env": schemas.ENV,
            "timeout_ms": TIMEOUT_MS,
            "image": text("What its file system is made of, such as node:22-alpine; host: this machine's own tools."),
            "max_output": schemas.MAX_OUTPUT,
        },
        ("command",),
        outputs=schemas.RUN_OUTPUTS,
        optional={**schemas.RUN_OPTIONAL, **schemas.NOTES},
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
            "cwd": schemas.CWD,
            "env": schemas.ENV,
            "timeout_ms": TIMEOUT_MS,
            "max_output": schemas.MAX_OUTPUT,
        },
        ("name", "command"),
        outputs=schemas.RUN_OUTPUTS,
        optional=schemas.RUN_OPTIONAL,
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
            "path": schemas.PATH,
            "content": schemas.CONTENT_TO_WRITE,
            "encoding": schemas.WRITTEN_AS,
        },
        ("name", "path", "content"),
        outputs=schemas.WRITTEN,
        destroys=True,
        repeats=True,
    ),
    ToolText(
        "sandbox_file_read",
        "Read a file from a sandbox",
        "Reads any file as data: text, or base64 where that is asked for or the file is not UTF-8.",
        {
            "name": SANDBOX,
            "path": schemas.PATH,
            "encoding": schemas.READ_AS,
            **schemas.PART,
        },
        ("name", "path"),
        outputs={**schemas.FILE_OUTPUTS, "content": schemas.CONTENT},
        reads=True,
    ),
    START,
    STOP,
)
