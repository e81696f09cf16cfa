"""Makes the attempts that are named, or all."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback

from . import ATTEMPTS
from .calls import Attempt, NoSuchCall


def run_attempt(function: Attempt) -> dict[str, object]:
    try:
        done = function()
    except NoSuchCall:
        return {"errno": "ENOSYS"}
    except OSError as error:
        return {"errno": errno.errorcode.get(error.errno or 0, str(error.errno))}
    except BaseException:  # noqa: BLE001 - the report is all that this process is for
        return {"error": traceback.format_exc()}
    return {"done": done}


def try_apart(function: Attempt) -> dict[str, object]:
    """In a process of its own: what it does to itself or dies of is its own affair."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os.write(writer, json.dumps(run_attempt(function), default=str).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    result: dict[str, object] = json.loads(content)
    return result


if __name__ == "__main__":
    chosen = sys.argv[1:] or ATTEMPTS
    sys.stdout.write(json.dumps({name: try_apart(ATTEMPTS[name]) for name in chosen}))
