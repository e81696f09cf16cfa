"""The tools as an agent sees them: names, titles, descriptions, schemas, hints. Plain data, no SDK."""

from __future__ import annotations

from typing import Final

from k8e.doors.mcp.tools import schemas
from k8e.doors.mcp.tools.schemas import ToolText, number, text, texts

COMMAND_WORDS: Final = (
    "With `command` (a list): in a temporary sandbox, with profile, compatibility_mode, network and image, unless "
    "session_id names a session. Figures that matplotlib shows (plt.show()) come as images. If `denied` is not empty, "
    "the network refused something: its hint says what to ask for."
)
TOOLS: Final[tuple[ToolText, ...]] = (
    ToolText(
        "sandbox_run",
        "Run code in a sandbox",
        "Run code or a command, isolated from the machine. With `code`: in your own session, which is made when there "
        f"is none, so that files and installed packages are there at the next call. {COMMAND_WORDS}",
        {
            "code": schemas.CODE,
            "language": schemas.LANGUAGE,
            "timeout": schemas.TIMEOUT,
            "session_id": schemas.SESSION,
            "command": schemas.ARGV,
            "profile": schemas.PROFILE,
            "compatibility_mode": schemas.MODE,
            "network": schemas.NETWORK,
            "cwd": schemas.CWD,
            "env": schemas.ENV,
            "timeout_ms": number("As timeout, in milliseconds.", default=30000),
            "image": schemas.IMAGE,
            "max_output": schemas.MAX_OUTPUT,
        },
        outputs=schemas.RUN_OUTPUTS,
        optional={**schemas.RUN_OPTIONAL, **schemas.NOTES},
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
            "warm": schemas.COUNT,
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
            "runtime_class": text("What isolates it; left out: the strongest that works here.", enum=schemas.RUNTIMES),
            "allowed_hosts": schemas.HOSTS,
        },
        outputs=schemas.CREATED,
        optional=schemas.EMULATED,
    ),
    ToolText(
        "sandbox_destroy_session",
        "Destroy a session",
        "Ends a session with all that runs in it and all its files.",
        {"session_id": text("Which session.")},
        ("session_id",),
        outputs=schemas.OK,
        destroys=True,
        repeats=True,
    ),
    ToolText(
        "sandbox_exec",
        "Run a command in a session",
        "Runs a command in a session that is there, and waits for it.",
        schemas.EXEC_INPUTS,
        ("command",),
        outputs=schemas.RUN_OUTPUTS,
        optional=schemas.RUN_OPTIONAL,
        destroys=True,
        reaches=True,
    ),
    ToolText(
        "sandbox_exec_stream",
        "Run a command and follow its output",
        "As sandbox_exec; while it runs, progress notifications carry the latest of its output.",
        schemas.EXEC_INPUTS,
        ("command",),
        outputs=schemas.RUN_OUTPUTS,
        optional=schemas.RUN_OPTIONAL,
        destroys=True,
        reaches=True,
    ),
    ToolText(
        "sandbox_read_output",
        "Read the rest of an output",
        "Reads a part of an output that a result has cut: full_output of that result has its uri.",
        {
            "uri": text("Which output."),
            "offset": {**schemas.COUNT, "description": "The first byte to read.", "default": 0},
            "length": {**schemas.MAX_OUTPUT, "description": "How many bytes to read."},
        },
        ("uri",),
        outputs={
            "uri": text("As it was asked for."),
            "offset": schemas.COUNT,
            "bytes": schemas.COUNT,
            "total": {**schemas.COUNT, "description": "Bytes of the whole output."},
            "more": {"type": "boolean", "description": "Whether there is more to read behind this part."},
            "content": text("Text; the exact bytes are beside it where they are not UTF-8."),
        },
        optional={"content_base64": text("The exact bytes, where they are not UTF-8.")},
        reads=True,
    ),
    ToolText(
        "sandbox_write_file",
        "Write a file",
        "Writes a file into a session. Missing directories are made.",
        {
            "session_id": schemas.SESSION,
            "path": schemas.PATH,
            "content": schemas.CONTENT_TO_WRITE,
            "mode": text("w replaces, a appends.", enum=["w", "a"], default="w"),
            "encoding": schemas.WRITTEN_AS,
        },
        ("path", "content"),
        outputs=schemas.WRITTEN,
        destroys=True,
    ),
    ToolText(
        "sandbox_read_file",
        "Read a file",
        "Reads a file of a session, or a part of it. PNG, JPEG, GIF and WebP come as images.",
        {"session_id": schemas.SESSION, "path": schemas.PATH, **schemas.PART},
        ("path",),
        outputs=schemas.FILE_OUTPUTS,
        optional={"content": schemas.CONTENT, "mime_type": text("Of an image.")},
        reads=True,
    ),
    ToolText(
        "sandbox_list_files",
        "List files",
        "Lists what is below a directory of a session and was modified since a point in time.",
        {
            "session_id": schemas.SESSION,
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
                        "size": schemas.COUNT,
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
        {"session_id": schemas.SESSION, "packages": texts("Requirements such as requests or requests>=2.", minItems=1)},
        ("packages",),
        outputs={
            "output": text("What pip printed."),
            "exit_code": schemas.RUN_OUTPUTS["exit_code"],
            "denied": schemas.DENIED,
        },
        optional={
            name: schema
            for name, schema in {**schemas.RUN_OUTPUTS, **schemas.RUN_OPTIONAL}.items()
            if not name.startswith("std")
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
            "parent_session_id": schemas.PARENT,
            "agent_type": text("What kind of agent it is for: a label of letters, digits, _ and -."),
            "workspace_path": text(
                "The directory in /workspace where its commands start; made when it is not there.", default="/workspace"
            ),
        },
        outputs={**schemas.CREATED, "parent_session_id": text("Whose child it is.")},
        optional=schemas.EMULATED,
    ),
    ToolText(
        "sandbox_confirm_action",
        "Ask a person",
        "Before something that cannot be undone: asks a person to approve it. With `action` it asks; if the answer is "
        "pending, call it again with `approval_id` until approved is true, or status says that it was not.",
        {
            "session_id": schemas.SESSION,
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
        outputs=schemas.OK,
        destroys=True,
        repeats=True,
    ),
    ToolText(
        "sandbox_file_write",
        "Write a file into a sandbox",
        "The same as sandbox_write_file, by its other name.",
        {
            "name": schemas.SESSION,
            "path": schemas.PATH,
            "content": schemas.CONTENT_TO_WRITE,
            "encoding": schemas.WRITTEN_AS,
        },
        ("path", "content"),
        outputs=schemas.WRITTEN,
        destroys=True,
        repeats=True,
    ),
    ToolText(
        "sandbox_file_read",
        "Read a file from a sandbox",
        "Reads any file of a session as data: text, or base64 where that is asked for or the file is not UTF-8.",
        {
            "name": schemas.SESSION,
            "path": schemas.PATH,
            "encoding": schemas.READ_AS,
            **schemas.PART,
        },
        ("path",),
        outputs={**schemas.FILE_OUTPUTS, "content": schemas.CONTENT},
        reads=True,
    ),
)
