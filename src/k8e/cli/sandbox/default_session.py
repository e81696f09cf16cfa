"""The session that `k8e sandbox run` uses when none is named: found, checked, or created and remembered (state.py)."""

from __future__ import annotations

from k8e.cli.client import SessionName
from k8e.cli.process import Failure, ServiceError
from k8e.cli.run import describes_session, has_hosts
from k8e.cli.sandbox.sessions import describe_content
from k8e.cli.values import split_hosts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from k8e.cli.client.service import Service
    from k8e.cli.run import RunOptions
    from k8e.cli.state import State


def check_hosts(client: Service, hosts: list[str], session: SessionName) -> bool:
    """Whether there is such a session. One with another list of hosts is not used: it may reach more than the caller
    wants, or less."""
    from k8e.policy import HostList, InvalidEntry

    try:
        wanted = HostList.parse(split_hosts(hosts))
    except InvalidEntry as error:
        text, more = f"allowed_hosts: {error.text!r}: {error.cause}", {"field": "allowed_hosts"}
        raise Failure("invalid_argument", text, hint=error.hint, more=more) from error
    try:
        listed = client.get_hosts(session).parse()["policy"]["allowed_hosts"]
    except ServiceError:
        return False
    if listed == list(wanted.texts):
        return True
    sid = session.session_id
    raise Failure(
        "hosts_differ",
        "the session is there already, and may reach other hosts than --allowed-hosts says",
        detail=f"{sid} may reach: {', '.join(listed) or 'nothing'}",
        hint=f"`k8e sandbox allow-hosts {sid} --hosts {','.join(wanted.texts) or repr('')}` changes its list",
    )


def renew(client: Service, options: RunOptions, state: State, *, gone: str) -> str:
    """Creates the session that the state file names, unless another process did while we waited for the lock."""
    with state:
        found = state.read()
        if describes_session(options):
            refuse_to_reuse(client, found)
        elif found and found != gone and has_hosts(client, options, SessionName(found)):
            return found
        wanted = describe_content(options)
        if options.allowed_hosts:
            wanted["allowed_hosts"] = split_hosts(options.allowed_hosts)
        if options.tenant:
            wanted["tenant_id"] = options.tenant
        session_id = str(client.create_session(wanted).parse()["session_id"])
        state.write(session_id)
        return session_id


def refuse_to_reuse(client: Service, session_id: str) -> None:
    """A manifest is for a new session only; to drop it in silence would be worse than to refuse."""
    if not session_id:
        return
    try:
        client.get_session(SessionName(session_id))
    except ServiceError:
        return
    raise Failure(
        "session_exists",
        "--manifest and --git-repo describe a new session, and there is one already",
        detail=session_id,
        hint=f"`k8e sandbox destroy {session_id}` first, or use `k8e sandbox create` and --session-id",
    )
