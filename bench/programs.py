"""The command lines as `k8e doctor --fix` installs them: with its script, the distribution's Python, which is the
baseline's too, and bytecode. Those of a checkout's environment have none of that, and where PYTHONDONTWRITEBYTECODE is
set they compile their sources each time."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from bench.baselines import INSTALLED, ROOT
from k8e.cli.install.places import PROGRAMS
from k8e.cli.install.program import ABOUT, SCRIPT

BARE_PYTHON = "/usr/bin/python3"
LIBRARY = ROOT / "src"


@cache
def find_python() -> str:
    """The baseline's interpreter, where the command lines run with it."""
    fits = subprocess.run([BARE_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], check=False)
    return sys.executable if fits.returncode else BARE_PYTHON


@cache
def find_daemon_python() -> str:
    """The same for the daemon, if it can load the compiled libraries of this environment. A Python that was built
    without profiles takes a quarter more time for the same work."""
    wanted = f"{sys.version_info[:2]} {sysconfig.get_config_var('SOABI')}"
    told = subprocess.run([BARE_PYTHON, "-I", "-S", "-c", ABOUT], capture_output=True, text=True, check=False)
    return BARE_PYTHON if told.stdout.strip() == wanted else sys.executable


def daemon_path() -> str:
    """PYTHONPATH for it."""
    libraries = (os.fspath(LIBRARY), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return os.pathsep.join(dict.fromkeys(libraries))


@cache
def install_program(name: str) -> str:
    python = find_python()
    subprocess.run([python, "-m", "compileall", "-q", os.fspath(LIBRARY)], check=True)
    script = Path(INSTALLED, "bin", name)
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT.format(python=python, library=os.fspath(LIBRARY), module=PROGRAMS[name]))
    script.chmod(0o755)
    return os.fspath(script)
