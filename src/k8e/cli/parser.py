"""The whole command line in argparse: everything but the usual spellings of `sandbox run`, and all of the help."""

from __future__ import annotations

import argparse
import os
import sys

from k8e.cli import commands
from k8e.cli.ending import Failure, write_all
from k8e.cli.options import OPTIONS, RunOptions, read_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Handler = Callable[[argparse.Namespace], int]

ABOUT = """\
Run code in a sandbox of its own: nothing it does can hurt this machine.

  k8e sandbox run "print('hello')" --lang python
  k8e sandbox run 'make test' --raw --timeout 600
  echo 'ls -la' | k8e sandbox run

The first run on a machine makes a session and remembers it, so files and installed
packages are still there at the next one.
"""

SANDBOX = """\
Most people need only `run`:

  k8e sandbox run 'pip list'                     in your session, made when there is none
  k8e sandbox run 'pip list' --tenant web        in the session that is called web

A session with wishes of its own is made, used and destroyed by its id:

  SID=$(k8e sandbox create --memory 2g | jq -r .session_id)
  k8e sandbox write $SID /workspace/job.py < job.py
  k8e sandbox run 'python3 job.py' --session-id $SID
  k8e sandbox read $SID /workspace/result.json --raw
  k8e sandbox destroy $SID

Every command prints one JSON object; errors are JSON too, with a code and a hint.
Exit codes: 1 the request failed, 2 the service cannot be reached, and for run the command's own.
"""

RUN = """\
Runs code and prints what came of it as JSON: stdout, stderr, exit_code, session_id and more.
Without CODE it is read from standard input. The exit code is the command's own; 124 is a timeout,
128+n a signal. Ctrl-C ends the command in the sandbox.

  k8e sandbox run 'echo $((6*7))'
  k8e sandbox run "print(6*7)" --lang python | jq -r .stdout
  k8e sandbox run --lang python < script.py
  k8e sandbox run 'tar xz && make' --stdin --raw < source.tar.gz
  k8e sandbox run './train.sh' --background --timeout 3600
"""

HOSTS = """\
Shows what a session may reach, or changes it, at once and for what runs in it as well. Entries are
names, names of all subdomains, addresses or blocks of them, with a port or for 80 and 443; several
are separated by commas.

  k8e sandbox allow-hosts SID
  k8e sandbox allow-hosts SID --add api.example.com,*.example.org
  k8e sandbox allow-hosts SID --remove api.example.com --add 192.0.2.0/24:5432
  k8e sandbox allow-hosts SID --hosts git.example.com:22
  k8e sandbox allow-hosts SID --clear
"""

SUBAGENT = """\
Makes a session for a sub-agent and prints its id. It has processes, limits and a /tmp of its own, and its
parent's /workspace, live in both directions. It can do nothing that its parent cannot, has no sub-agents
itself, and ends with its parent.

  SUB1=$(k8e sandbox subagent PARENT-SID | jq -r .session_id)
  SUB2=$(k8e sandbox subagent PARENT-SID --agent-type reviewer --read-only | jq -r .session_id)
  k8e sandbox run 'python3 task_a.py' --session-id $SUB1 --raw &
  k8e sandbox run 'python3 task_b.py' --session-id $SUB2 --raw &
  wait
"""

START = """\
Brings a stopped session back on its own files, also after a reboot: a session that was made with --persistent.
Variables that it had it has again, but for secrets, which no disk has: they have to be given again.

  SID=$(k8e sandbox create --persistent --secret TOKEN | jq -r .session_id)
  k8e sandbox stop $SID
  k8e sandbox start $SID --secret TOKEN
"""

CONFIRM = """\
Asks a person whether something may be done, and waits for the answer. The command with which they approve
it is printed on stderr; whoever asks cannot approve it themselves (docs/approvals.md). Exits with 0 when it
was approved, with 1 when it was rejected or nobody answered in time.

  k8e sandbox confirm SID 'delete /workspace/data' && k8e sandbox run 'rm -r data' --session-id SID
  k8e sandbox confirm SID 'send the report' --no-wait
  k8e sandbox approvals appr-0123456789abcdef
"""

APPROVE = """\
Answers what a program asked with `confirm`. What a program of your own user asked is answered at another terminal than
the program's, where you type that you mean it; root, or an operator's key, answers without.

  k8e sandbox approvals
  k8e sandbox approve appr-0123456789abcdef --reason 'it is a copy'
  k8e sandbox approve appr-0123456789abcdef --reject
"""

SKILL = """\
Tells agents on this machine about sandboxes: puts an entry into their list of MCP servers, and a skill where they look
for skills. Nothing else in their files is changed, and what was there before is kept beside them.

  k8e sandbox-install-skill all
  k8e sandbox-install-skill claude --dry-run
  k8e sandbox-install-skill all --uninstall
  K8E_SANDBOX_MCP_ADDR=:8811 k8e sandbox-install-skill all       a server that runs already, instead of a command
"""

SERVER = """\
Runs the daemon in the foreground until Ctrl-C or SIGTERM. Sandboxes live on without it.
You rarely need this: as root, the first command starts the daemon by itself. deploy/k8e.service
is the unit for systemd. Members of the group k8e may use the daemon, when there is that group.

  K8E_STATE_DIR   where sandboxes live (/var/lib/k8e)
  K8E_RUN_DIR     where the socket is (/run/k8e)
  K8E_CONFIG      the file with settings (/etc/k8e/k8e.toml, when it is there)
"""

DOCTOR = """\
Tries every runtime and control for real, in sandboxes that are thrown away, and says what works here,
how it was tried, and what to install. Exits with 1 when the default would not be safe.

With --fix it first installs the Debian packages that are missing and removes what engines left that
are dead (sandboxes, mounts, groups, rules), and says each step. What is alive it never touches.
"""


IMAGE = """\
What sandboxes can be made of, besides this machine's own tools. Names are docker's. Who you are at a registry is read
from what `docker login` or `podman login` left (docs/images.md).

  k8e image pull python:3.12-slim
  k8e sandbox create --image python:3.12-slim
  docker save mine:1 | k8e image import -
  sudo k8e image build-base
"""

KEYS = """\
Keys with which programs on other machines use this machine's sandboxes (docs/gateway.md).

  k8e sandbox-apikey create ci --ttl 30d
  k8e sandbox-apikey list
  k8e sandbox-apikey delete ci
"""

MCP = """\
Serves the sandboxes of this machine to an agent, by the Model Context Protocol, on standard input and
output, or over HTTP to many. Each connection has a session of its own, which ends with it.

  claude mcp add k8e-sandbox -- k8e sandbox-mcp
  k8e sandbox-mcp --http --http-addr :8811
  k8e sandbox-mcp --http --http-addr 0.0.0.0:8811       other machines too: TLS, and an API key of each agent
  k8e sandbox-mcp --endpoint sandbox.example.com:50051  the sandboxes of a gateway
"""

CONNECT = """\
Checks that a gateway is the one that your API key is for, exchanges the key for a certificate, and remembers
both under a name. The key is read from standard input or K8E_SANDBOX_APIKEY, and is not stored.

  k8e connect sandbox.example.com:50051
  k8e sandbox run 'uname -a'
"""

LOGIN = """\
A new certificate for a gateway that is known already: with K8E_SANDBOX_APIKEY by that key, else by the certificate that
there is. You rarely need this: commands renew it when a third of its life is left.
"""


class Parser(argparse.ArgumentParser):
    """argparse exits with 2 for a usage error, which here means that the service cannot be reached."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise Failure("usage", message, detail=" ".join(self.format_usage().split()), hint=f"{self.prog} --help")


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        write_all(1, f"k8e {version('k8e')}\n".encode())
        parser.exit()


def dispatch(arguments: list[str]) -> int:
    parsed = build_parser().parse_args(arguments)
    for flag in ("endpoint", "apikey", "profile"):
        if value := getattr(parsed, flag):
            os.environ[f"K8E_SANDBOX_{flag.upper()}"] = value
    handler: Handler = parsed.handler
    return handler(parsed)


def read_with(read: Callable[[str], object], noun: str) -> Callable[[str], object]:
    """argparse would name our function in its message."""

    def read_value(text: str) -> object:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is no {noun}") from None

    return read_value


def build_parser() -> Parser:
    parser = Parser(prog=os.path.basename(sys.argv[0]) or "k8e", description=ABOUT)
    parser.add_argument("--version", action=Version, nargs=0, help="say which version this is")
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="a gateway (default: this machine's own daemon)")
    parser.add_argument(
        "--apikey", metavar="KEY", help="a key for it; better in K8E_SANDBOX_APIKEY, where others cannot see it"
    )
    parser.add_argument("--profile", metavar="NAME", help="a gateway that `k8e connect` has given this name")
    commands_of = parser.add_subparsers(metavar="COMMAND", required=True)
    add_sandbox(commands_of)
    server = commands_of.add_parser("server", help="run the daemon in the foreground", description=SERVER)
    server.set_defaults(handler=serve)
    doctor = commands_of.add_parser("doctor", help="say what works on this machine", description=DOCTOR)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.add_argument("--fix", action="store_true", help="first install what is missing and remove what is left over")
    doctor.set_defaults(handler=examine)
    skill = commands_of.add_parser("sandbox-install-skill", help="tell agents about us", description=SKILL)
    names = ("kiro", "claude", "gemini", "codex", "all")
    skill.add_argument("agent", nargs="?", choices=names, default="all", help=f"{', '.join(names)} (default)")
    skill.add_argument("--dry-run", action="store_true", help="only say what would be written")
    skill.add_argument("--uninstall", action="store_true", help="take it out again")
    skill.set_defaults(handler=install_skill)
    add_images(commands_of)
    add_keys(commands_of)
    add_mcp(commands_of)
    add_connections(commands_of)
    return parser


def add_images(parent: Any) -> None:
    image = parent.add_parser("image", help="what sandboxes can be made of", description=IMAGE)
    subcommands = image.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, function: str, about: str) -> Parser:
        added: Parser = subcommands.add_parser(name, help=about, description=about.capitalize() + ".")
        added.set_defaults(handler=lambda parsed: run_image(function, parsed))
        return added

    pull = add("pull", "pull", "get an image from its registry")
    pull.add_argument("name", metavar="NAME")
    take = add("import", "add", "take an image from a file that docker save or skopeo wrote, or an OCI layout")
    take.add_argument("file", metavar="FILE", help="an archive, a directory, or - for standard input")
    take.add_argument("--name", dest="image", default="", metavar="NAME", help="default: as the archive calls it")
    add("list", "list_images", "list the images that you can use")
    remove = add("remove", "remove", "forget an image")
    remove.add_argument("name", metavar="NAME")
    prune = add("prune", "prune", "forget all your images that no session of yours is made of")
    span = read_with(commands.read_span, "span of time")
    about = "only those not used for that long: 1h, 7d (default: all)"
    prune.add_argument("--unused-for", type=span, default=0.0, metavar="TIME", help=about)
    for parser in (pull, take, remove, prune):
        parser.add_argument("--tenant", default="", metavar="NAME", help="of the gateway, whose it is to be; root only")
    add("build-base", "build_base", "build k8e/base out of this machine's own package sources; root only")


def run_image(function: str, parsed: argparse.Namespace) -> int:
    from k8e.cli import images

    handler: Handler = getattr(images, function)
    return handler(parsed)


def add_keys(parent: Any) -> None:
    keys = parent.add_parser("sandbox-apikey", help="keys for programs on other machines", description=KEYS)
    subcommands = keys.add_subparsers(metavar="COMMAND", required=True)
    create = subcommands.add_parser("create", help="make a key; it is shown this once")
    create.add_argument("name", metavar="NAME")
    life = read_with(commands.read_life, "span of time")
    create.add_argument("--ttl", type=life, default="30d", metavar="TIME", help="such as 30d (default), 12h or never")
    create.add_argument("--scope", choices=("run", "operator", "admin"), default="run", help="default: run")
    create.add_argument(
        "--tenant", action="append", default=[], metavar="NAME", help="whose sandboxes; an operator's may be several"
    )
    create.set_defaults(handler=commands.create_key)
    subcommands.add_parser("list", help="list the keys").set_defaults(handler=commands.list_keys)
    delete = subcommands.add_parser("delete", help="revoke a key and all its certificates, at once")
    delete.add_argument("name", metavar="NAME")
    delete.set_defaults(handler=commands.delete_key)


def add_mcp(parent: Any) -> None:
    mcp = parent.add_parser("sandbox-mcp", help="serve sandboxes to agents (MCP)", description=MCP)
    mcp.add_argument("--http", action="store_true", help="serve Streamable HTTP at /mcp instead of stdin and stdout")
    mcp.add_argument(
        "--http-addr",
        default=os.environ.get("K8E_SANDBOX_MCP_ADDR") or ":8811",
        metavar="HOST:PORT",
        help="where; default: K8E_SANDBOX_MCP_ADDR, or :8811, which is 127.0.0.1",
    )
    # SUPPRESS: what stands before the subcommand is not overwritten by what does not stand behind it.
    mcp.add_argument("--endpoint", default=argparse.SUPPRESS, metavar="HOST:PORT", help="a gateway")
    mcp.add_argument(
        "--tls-cert",
        default="",
        metavar="FILE",
        help="who we are to the gateway, or whom to trust; with --http: what clients are shown",
    )
    mcp.add_argument("--tls-key", default="", metavar="FILE", help="its key")
    mcp.add_argument("--tenant-id", default="", metavar="NAME", help="keep sessions for this tenant, and use its own")
    mcp.set_defaults(handler=run_mcp)


def add_connections(parent: Any) -> None:
    connect = parent.add_parser("connect", help="use a gateway on another machine", description=CONNECT)
    connect.add_argument("address", nargs="?", metavar="HOST:PORT", help="default: --endpoint")
    connect.add_argument(
        "--name", default="", metavar="NAME", help="the profile's name; default: --profile, or default"
    )
    connect.set_defaults(handler=run_connect)
    login = parent.add_parser("login", help="get a new certificate for a profile", description=LOGIN)
    login.add_argument("name", nargs="?", default="", metavar="PROFILE", help="default: --profile, or the last one")
    login.set_defaults(handler=run_login)


def add_sandbox(parent: Any) -> None:
    sandbox = parent.add_parser("sandbox", help="run code, make sessions, handle their files", description=SANDBOX)
    subcommands = sandbox.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, handler: Handler, about: str, description: str = "") -> Parser:
        added: Parser = subcommands.add_parser(name, help=about, description=description or about.capitalize() + ".")
        added.set_defaults(handler=handler)
        return added

    add_run_options(add("run", run_parsed, "run code or a shell command", RUN))
    add_create_options(add("create", commands.create, "make a session and print its id"))
    add_child_options(add("subagent", commands.subagent, "make a session that shares another's workspace", SUBAGENT))
    add("get", commands.get, "show a session").add_argument("sid", metavar="SID")
    add_hosts_options(add("allow-hosts", commands.allow_hosts, "show or change what a session may reach", HOSTS))
    sessions = add("sessions", commands.sessions, "list your sessions")
    sessions.add_argument("--phase", choices=("active", "all"), default="active", help="default: active")
    stop = add("stop", commands.stop, "end what runs in a persistent session; its files stay")
    stop.add_argument("sid", metavar="SID")
    start = add("start", commands.start, "bring a stopped session back, with its files", START)
    start.add_argument("sid", metavar="SID")
    for name, noun, about in (
        ("--env", "NAME=VALUE", "another variable for all its commands, or another value"),
        ("--secret", "NAME", "a variable with the value that it has here"),
    ):
        start.add_argument(name, action="append", default=[], metavar=noun, help=f"{about}; may be given several times")
    add("destroy", commands.destroy, "end a session with all that is in it").add_argument("sid", metavar="SID")
    write = add("write", commands.write, "write standard input to a file of a session")
    write.add_argument("sid", metavar="SID")
    write.add_argument("path", metavar="PATH", help="relative ones begin at /workspace")
    write.add_argument("--mode", choices=("w", "a"), default="w", help="w replaces (default), a appends")
    read = add("read", commands.read, "read a file of a session")
    read.add_argument("sid", metavar="SID")
    read.add_argument("path", metavar="PATH", help="relative ones begin at /workspace")
    read.add_argument("--raw", action="store_true", help="print the bytes as they are instead of JSON")
    entries = add("list", commands.list_files, "list the files of a session")
    entries.add_argument("sid", metavar="SID")
    entries.add_argument("--path", default="", metavar="DIR", help="default: /workspace")
    entries.add_argument("--since", type=float, default=0.0, metavar="TIME", help="only what changed after (unix time)")
    status = add("status", commands.status, "say whether sandboxes work, and which session is yours")
    status.add_argument("--tenant", default="", metavar="NAME")
    add("poll", commands.poll, "show how a background run is doing").add_argument("run_id", metavar="RUN-ID")
    add("kill", commands.kill, "end a background run").add_argument("run_id", metavar="RUN-ID")
    add("ps", commands.ps, "list the commands of a session").add_argument("sid", metavar="SID")
    add("log", commands.log, "list the runs of a session").add_argument("sid", metavar="SID")
    add_approvals(add)


def add_approvals(add: Callable[..., Parser]) -> None:
    confirm = add("confirm", run_confirm, "ask a person whether something may be done", CONFIRM)
    confirm.add_argument("sid", metavar="SID")
    confirm.add_argument("action", metavar="ACTION", help="what is to be done, for the person who decides")
    seconds = read_with(read_seconds, "span of time")
    confirm.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help="for how long it can be answered; default: 30"
    )
    confirm.add_argument("--no-wait", action="store_true", help="print the approval's id at once")
    approve = add("approve", run_approve, "answer such a question", APPROVE)
    approve.add_argument("approval_id", metavar="APPROVAL-ID")
    approve.add_argument("--reject", action="store_true", help="answer no")
    approve.add_argument("--reason", default="", metavar="TEXT", help="for whoever asked, and the audit log")
    approvals = add("approvals", run_approvals, "list the questions that can be answered, or show one")
    approvals.add_argument("approval_id", nargs="?", default="", metavar="APPROVAL-ID")
    approvals.add_argument("--all", action="store_true", help="those that are settled, too")


def add_run_options(parser: Parser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="default: standard input")
    defaults = vars(RunOptions())
    for name, (read, noun, about) in OPTIONS.items():
        default = defaults[name[2:].replace("-", "_")]
        if read is None:
            parser.add_argument(name, action="store_true", help=about)
        elif read is list:
            parser.add_argument(name, action="append", default=default, metavar=noun, help=about)
        else:
            parser.add_argument(name, type=read_with(read, noun), default=default, metavar=noun, help=about)


def add_hosts_options(parser: Parser) -> None:
    parser.add_argument("sid", metavar="SID")
    for name, about in (
        ("--add", "put these on the list"),
        ("--remove", "take these off it; connections to them are cut"),
        ("--hosts", "instead of the whole list"),
    ):
        parser.add_argument(name, action="append", metavar="HOSTS", help=about)
    parser.add_argument("--clear", action="store_true", help="take everything off it")


def add_wishes(
    parser: Parser, runtime: str, image: str, cpus: str, memory: str, disk: str, ttl: str, hosts: str
) -> Callable[..., None]:
    """What a session and a sub-agent's can both be asked to have; the words are their defaults."""

    def add(name: str, noun: str, about: str, **settings: Any) -> None:
        parser.add_argument(name, metavar=noun, help=about, **settings)

    size, span = read_with(commands.read_size, "size"), read_with(commands.read_span, "span of time")
    add("--runtime", "NAME", f"gvisor or native; default: {runtime}", default="")
    add("--image", "NAME", f"default: {image}", default="")
    add("--session-id", "SID", "the id to give it; default: chosen for you", default="")
    add(
        "--env",
        "NAME=VALUE",
        "a variable for all its commands; may be given several times",
        action="append",
        default=[],
    )
    add(
        "--secret",
        "NAME",
        "a variable with the value that it has here, which is kept on no disk; may be given several times",
        action="append",
        default=[],
    )
    add("--cpus", "N", f"default: {cpus}", type=float)
    add("--memory", "SIZE", f"such as 512m or 2g; default: {memory}", type=size)
    add("--disk", "SIZE", f"default: {disk}", type=size)
    add("--ttl", "TIME", f"unused for that long it is destroyed: 90s, 15m, 2d; default: {ttl}", type=span)
    add(
        "--allowed-hosts",
        "HOSTS",
        f"what it may reach, instead of {hosts}: a.example,*.b.example:8443; '' is nothing",
        action="append",
        default=[],
    )
    return add


def add_child_options(parser: Parser) -> None:
    parser.add_argument("parent", metavar="PARENT-SID", help="the session whose workspace it shares")
    same = "its parent's"
    add = add_wishes(parser, same, same, same, same, same, same, "all that its parent may")
    add("--agent-type", "NAME", "what kind of agent it is for, as a label", default="")
    add("--workspace-path", "DIR", "where in /workspace its commands start; made when it is not there", default="")
    parser.add_argument("--read-only", action="store_true", help="it sees the workspace and cannot change it")
    parser.add_argument("--powerless", action="store_true", help="not even its root has capabilities")


def add_create_options(parser: Parser) -> None:
    add = add_wishes(
        *(parser, "the strongest that works here", "host, this machine's own tools"),
        *("0.5", "512m", "2g", "1h", "the usual list"),
    )
    add("--tenant", "NAME", "whom it belongs to", default="")
    add("--manifest", "FILE", "YAML with files, directories and repositories to begin with", default="")
    add("--git-repo", "URL", "clone this into /workspace, under its own name", default="")
    add("--git-ref", "REF", "the branch, tag or commit of --git-repo", default="")
    parser.add_argument(
        "--persistent", action="store_true", help="it can be stopped and started, and does not end by itself"
    )


def run_parsed(parsed: argparse.Namespace) -> int:
    from k8e.cli.run import run

    options = RunOptions()
    for name in vars(options):
        setattr(options, name, getattr(parsed, name))
    return run(options)


def run_confirm(parsed: argparse.Namespace) -> int:
    from k8e.cli.approvals import confirm

    return confirm(parsed)


def run_approve(parsed: argparse.Namespace) -> int:
    from k8e.cli.approvals import approve

    return approve(parsed)


def run_approvals(parsed: argparse.Namespace) -> int:
    from k8e.cli.approvals import approvals

    return approvals(parsed)


def install_skill(parsed: argparse.Namespace) -> int:
    from k8e.cli.skill.install import install_skill

    return install_skill(parsed)


def run_connect(parsed: argparse.Namespace) -> int:
    from k8e.cli.client import quieten_grpc

    quieten_grpc()
    from k8e.cli.remote.commands import connect

    return connect(parsed)


def run_login(parsed: argparse.Namespace) -> int:
    from k8e.cli.client import quieten_grpc

    quieten_grpc()
    from k8e.cli.remote.commands import login

    return login(parsed)


def run_mcp(parsed: argparse.Namespace) -> int:
    from k8e.cli.mcp import bridge, listen

    for name, value in (("CERT", parsed.tls_cert), ("KEY", parsed.tls_key)):
        if value:
            os.environ[f"K8E_SANDBOX_{name}"] = value
    return listen(parsed.http_addr, parsed.tenant_id) if parsed.http else bridge(parsed.tenant_id)


def serve(parsed: argparse.Namespace) -> int:
    from k8e.daemon import Refused, run_in_foreground

    try:
        run_in_foreground()
    except Refused as refused:
        raise Failure.of(refused.body) from refused
    return 0


def examine(parsed: argparse.Namespace) -> int:
    from k8e.daemon import Refused, run_doctor

    try:
        return run_doctor(as_json=parsed.json, fix=parsed.fix)
    except Refused as refused:
        raise Failure.of(refused.body) from refused
