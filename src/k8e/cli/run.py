"""`k8e sandbox run`. Imports only what it uses on its way (see k8e.cli)."""

from __future__ import annotations

import os

from k8e.cli.client.http import JSON, aim, open_client, quote, quote_json
from k8e.cli.client.response import nonsense, read_object
from k8e.cli.process import FAILED, Failure, read_all, write_all
from k8e.cli.state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.client.http import AnyClient
    from k8e.cli.options import RunOptions

MESSAGE = 64 << 20
STDIN_IN_JSON = 46 << 20  # base64 takes a third more, and the rest of a message has to fit as well
STDOUT, STDERR, RESULT_FRAME, ERROR_FRAME = 1, 2, 5, 6
GONE = ("session_not_found", "session_destroying")


def run(options: RunOptions) -> int:
    check_combination(options)
    fields = describe_run(options)
    client = open_client()
    if options.session_id:
        has_hosts(client, options, options.session_id)  # when there is no such session, the attempt says so
        return Attempt(client, options, options.session_id, fields).finish()
    state = State(options.tenant, client.place)
    named = state.read()
    if named and not describes_session(options) and has_hosts(client, options, named):
        attempt = Attempt(client, options, named, fields)
        if not attempt.session_is_gone():
            return attempt.finish()
    # Nothing has run so far: there was no session to run it in.
    return Attempt(client, options, renew(client, options, state, gone=named), fields).finish()


def check_combination(options: RunOptions) -> None:
    if options.session_id and options.tenant:
        raise Failure("usage", "--session-id and --tenant both name a session: give one of them")
    if (options.tenant_id or options.owner) and not options.session_id:
        hint = "--tenant NAME is for the session that a name stands for"
        raise Failure("usage", "--tenant-id and --owner say whose session --session-id means", hint=hint)
    if options.session_id and describes_session(options):
        error = "--manifest and --git-repo describe a new session, --session-id names one that is there"
        raise Failure("usage", error, hint="give them to `k8e sandbox create`")
    if options.background and options.raw:
        raise Failure("usage", "--background does not wait for the output that --raw streams: give one of them")
    if options.stdin and options.code is None:
        raise Failure("usage", "--stdin is for the command's input: give the code as an argument")


def describes_session(options: RunOptions) -> bool:
    return bool(options.manifest or options.git_repo or options.git_ref)


def has_hosts(client: AnyClient, options: RunOptions, session_id: str) -> bool:
    """Whether there is such a session. One whose list is another than the one that was asked for is not used, neither
    with more than somebody wanted nor with less."""
    if not options.allowed_hosts:
        return True
    from k8e.cli.sessions import split_hosts
    from k8e.policy import HostList, InvalidEntry

    try:
        wanted = HostList.parse(split_hosts(options.allowed_hosts))
    except InvalidEntry as error:
        text = f"allowed_hosts: {error.text!r}: {error.cause}"
        body = {"error": text, "detail": "", "code": "invalid_argument", "hint": error.hint, "field": "allowed_hosts"}
        raise Failure.of(body) from error
    response = client.request("GET", aim(f"/v1/sessions/{quote(session_id)}/hosts", options))
    answer = read_object(response)
    if response.status != 200:
        return False
    listed = answer["policy"]["allowed_hosts"]
    if listed == list(wanted.texts):
        return True
    raise Failure(
        "hosts_differ",
        "the session is there already, and may reach other hosts than --allowed-hosts says",
        detail=f"{session_id} may reach: {', '.join(listed) or 'nothing'}",
        hint=f"`k8e sandbox allow-hosts {session_id} --hosts {','.join(wanted.texts) or repr('')}` changes its list",
    )


def describe_run(options: RunOptions) -> str:
    """The members of the request's JSON object."""
    code = options.code
    if code is None:
        # Decoded like an argument, because it is encoded like one.
        code = os.fsdecode(read_all(0, MESSAGE))
    fields = f'"code": {quote_json(code)}, "language": "{options.lang}", "timeout": {options.timeout!r}'
    if options.env:
        fields += f', "env": {{{describe_env(options.env)}}}'
    if options.workdir:
        fields += f', "workdir": {quote_json(options.workdir)}'
    if options.background:
        fields += ', "background": true'
    if options.stdin and not options.raw:
        from binascii import b2a_base64

        content = b2a_base64(read_all(0, STDIN_IN_JSON), newline=False).decode("ascii")
        fields += f', "stdin_base64": "{content}"'
    return fields


def describe_env(assignments: list[str]) -> str:
    """Of two with one name the last counts, as in JSON itself."""
    members = []
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise Failure("usage", "--env takes NAME=VALUE", hint="--env DEBUG=1")
        members.append(f"{quote_json(name)}: {quote_json(value)}")
    return ", ".join(members)


def renew(client: AnyClient, options: RunOptions, state: State, *, gone: str) -> str:
    """A session for the state file to name: a new one, unless somebody else made one while we waited for the lock."""
    with state:
        found = state.read()
        if describes_session(options):
            refuse_to_reuse(client, found)
        elif found and found != gone and has_hosts(client, options, found):
            return found
        import json

        from k8e.cli.sessions import describe_session, split_hosts

        wanted = describe_session(manifest=options.manifest, git_repo=options.git_repo, git_ref=options.git_ref)
        if options.allowed_hosts:
            wanted["allowed_hosts"] = split_hosts(options.allowed_hosts)
        if options.tenant:
            wanted["tenant_id"] = options.tenant
        response = client.request("POST", "/v1/sessions", json.dumps(wanted).encode(), JSON)
        answer = read_object(response)
        if response.status != 201:
            raise Failure.of(answer)
        state.write(answer["session_id"])
        return str(answer["session_id"])


def refuse_to_reuse(client: AnyClient, session_id: str) -> None:
    """What a session begins with cannot be brought into one that has begun; dropping it in silence would be worse."""
    if not session_id:
        return
    response = client.request("GET", f"/v1/sessions/{quote(session_id)}")
    response.read()
    if response.status == 200:
        raise Failure(
            "session_exists",
            "--manifest and --git-repo describe a new session, and there is one already",
            detail=session_id,
            hint=f"`k8e sandbox destroy {session_id}` first, or use `k8e sandbox create` and --session-id",
        )


class Attempt:
    """The request to run, sent once; what becomes of it is decided when its answer has begun."""

    def __init__(self, client: AnyClient, options: RunOptions, session_id: str, fields: str) -> None:
        self._options = options
        self._client = client
        self._body = b""
        self._fed = options.raw and options.stdin
        target = aim(f"/v1/sessions/{quote(session_id)}/runs", options)
        if self._fed:
            self._response = client.upload(target, f"{{{fields}}}".encode("ascii"))
        else:
            stream = ', "stream": true' if options.raw else ""
            self._response = client.request("POST", target, f"{{{fields}{stream}}}".encode("ascii"), JSON)

    def session_is_gone(self) -> bool:
        """There is no such session, or soon will not be: nothing was run."""
        if self._response.status not in (404, 409):
            return False
        from k8e.cli.client.failures import parse_answer

        self._body = self._response.read()
        return parse_answer(self._body)["code"] in GONE

    def finish(self) -> int:
        response = self._response
        if response.status != 200:
            write_all(1, check_object(self._body or response.read()))
            return FAILED
        if self._options.raw:
            return self._stream()
        write_all(1, check_object(response.read()))
        if self._options.background:
            return 0
        return FAILED if response.exit_code is None else response.exit_code

    def _stream(self) -> int:
        if self._fed:
            from _thread import start_new_thread

            start_new_thread(self._client.feed, (0,))
        ended = False
        try:
            for kind, data in self._response.frames():
                if kind in (STDOUT, STDERR):
                    write_all(kind, data)
                elif kind == RESULT_FRAME:
                    ended = True
                    if b'"denied": []' not in data:
                        tell_denied(data)
                elif kind == ERROR_FRAME:
                    write_all(STDERR, data)
                    return FAILED
            if not ended:
                raise nonsense("a run without a result")
        except Failure as failure:
            # stdout is the command's: what has to be said now goes to stderr.
            import json

            write_all(STDERR, json.dumps(failure.body).encode() + b"\n")
            return failure.status
        return FAILED if self._response.exit_code is None else self._response.exit_code


def check_object(body: bytes) -> bytes:
    """Looks at its ends only: to read all of it takes longer than everything else."""
    if not body.startswith(b"{") or not body.endswith(b"}\n"):
        raise nonsense(f"{body[:64]!r} is no JSON object")
    return body


def tell_denied(result: bytes) -> None:
    """What the network refused to the command, a line each, after its last output."""
    from k8e.cli.client.failures import parse_answer

    content = parse_answer(result)
    lines = []
    for denial in content.get("denied", []):
        address = f"({denial['address']})" if denial["host"] and denial["address"] else denial["address"]
        where = " ".join(part for part in (denial["host"], address) if part)
        port = f":{denial['port']}" if denial["port"] else ""
        lines.append(f"k8e: denied {where}{port}: {denial['reason']}; {denial['hint']}\n")
    if content.get("denied_more"):
        lines.append(f"k8e: denied {content['denied_more']} more\n")
    write_all(STDERR, "".join(lines).encode())
