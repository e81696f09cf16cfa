"""`k8e sandbox logs`: the output of a background run, so far or to its end. The run does not notice."""

from __future__ import annotations

from base64 import b64decode

from k8e.cli.client import open_client
from k8e.cli.process import FAILED, Failure, write_all
from k8e.cli.view import show_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from k8e.cli.client.service import Service

WAIT = 5.0  # seconds for which one request waits for more
STDOUT, STDERR = 1, 2


def print_output(options: argparse.Namespace) -> int:
    client = open_client()
    run = client.get_run(options.run_id).parse()
    seen = {STDOUT: 0, STDERR: 0}
    print_new(run, seen)
    if not options.follow:
        return 0
    try:
        run = follow(client, options.run_id, run, seen)
    except Failure as failure:
        show_error(failure.body, STDERR)  # stdout is the run's
        return failure.status
    if run["denied"]:
        from k8e.cli.denials import list_denials

        write_all(STDERR, "".join(f"k8e: {line}\n" for line in list_denials(run)).encode())
    return FAILED if run["exit_code"] is None else int(run["exit_code"])


def follow(client: Service, run_id: str, run: dict[str, Any], seen: dict[int, int]) -> dict[str, Any]:
    while run["status"] == "running":
        run = client.get_run(run_id, seen[STDOUT], seen[STDERR], WAIT).parse()
        print_new(run, seen)
    return run


def print_new(run: dict[str, Any], seen: dict[int, int]) -> None:
    """Prints what follows on what was seen. Of a run that writes faster than it is asked, the middle is not kept."""
    for descriptor, stream in ((STDOUT, "stdout"), (STDERR, "stderr")):
        text = run.get(f"{stream}_base64")
        content = b64decode(text) if text is not None else run[stream].encode("utf-8", "surrogateescape")
        missing = run[f"{stream}_bytes"] - seen[descriptor] - len(content)
        if missing > 0 and (content or run["status"] != "running"):
            write_all(STDERR, f"k8e: {missing} bytes of {stream} are not kept any more\n".encode())
            seen[descriptor] += missing
        write_all(descriptor, content)
        seen[descriptor] += len(content)
