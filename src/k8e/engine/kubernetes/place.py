"""The user, directories and environment that commands in a pod start with. The same in every pod: Kubernetes does not
tell what an image's configuration says, and a pod that may not have root has one user."""

from __future__ import annotations

from typing import Final

from k8e.engine import Place
from k8e.link.model import Identity

USER_ID: Final = 1000
HOME: Final = "/home/user"
WORKSPACE: Final = "/workspace"
PROGRAMS: Final = "/k8e"
LOADER: Final = f"{PROGRAMS}/k8e-loader.so"

_ENV: Final = {
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "LOGNAME": "user",
    "PATH": f"{HOME}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_USER": "1",  # the root of an image is not this user's to write to
    "USER": "user",
}

PLACE: Final = Place(
    user=Identity(USER_ID, USER_ID),
    home=HOME.encode(),
    workspace=WORKSPACE.encode(),
    env=tuple((name.encode(), value.encode()) for name, value in sorted(_ENV.items())),
    loader=LOADER.encode(),
)
