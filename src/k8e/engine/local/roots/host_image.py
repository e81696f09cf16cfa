"""The `host` image: the machine's own toolchain (/usr, read-only) under a small root of our own, and nothing else of
the machine. No home directories, no /root, no /var, no sockets; /etc is made here from a short list.

The engine has two uses for it: files that become the sandbox's private, writable root, and directories of the machine
that are mounted over it read-only. Other images are in image_root.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from k8e.engine import Place
from k8e.engine.local.disk.tree import give_tree, set_modes
from k8e.engine.local.runtime.bundle import LOADER, HostPath
from k8e.engine.local.toolchain.package_clients import SYSTEM_PYTHON
from k8e.link.model import Identity

USER_ID = 1000
HOME = "/home/user"
VENV = f"{HOME}/.venv"
TOOLS = "/opt/k8e"

# Directories of the root that lead into /usr on a merged system.
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DIRECTORIES = (
    "dev",
    "etc",
    "home",
    "opt",
    "proc",
    "run",
    "srv",
    "sys",
    "tmp",
    "usr",
    "var",
    "var/tmp",
    "workspace",
    "root",
)
# What the toolchain reads below /etc. Configuration of the machine itself (users, network, services, keys) is not here.
_ETC = (
    "alternatives",
    "debian_version",
    "fonts",
    "gai.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "mime.types",
    "os-release",
    "perl",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
_ETC_PATTERNS = ("java-*-openjdk", "python3*")
_PASSWD = f"""root:x:0:0:root:/root:/bin/bash
user:x:{USER_ID}:{USER_ID}:user:{HOME}:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = f"""root:x:0:
tty:x:5:
user:x:{USER_ID}:
nogroup:x:65534:
"""
_HOSTS = """127.0.0.1 localhost sandbox
::1 localhost ip6-localhost ip6-loopback
"""
_NSSWITCH = """passwd: files
group: files
hosts: files dns
networks: files
protocols: files
services: files
"""


# The backend of matplotlib comes with the import of matplotlib. Every start of Python pays for this line, so it loads
# nothing, and says no to other modules after one comparison. Python reads the file twice where a virtual environment
# has the system's packages too.
_MATPLOTLIB = ("k8e_matplotlib.py", "k8e_figures.py")
_FIND_MATPLOTLIB = (
    "any(getattr(each, '__module__', '') == 'k8e_matplotlib' for each in sys.meta_path) or "
    "sys.meta_path.insert(0, type('Finder', (), {'__module__': 'k8e_matplotlib', 'find_spec': classmethod("
    "lambda finder, name, path=None, target=None: "
    "__import__('k8e_matplotlib').find_matplotlib(finder) if name == 'matplotlib' else None)}))"
)


def host_place(more: Iterable[tuple[str, str]] = ()) -> Place:
    """`more` are variables that the image's own do not have."""
    places = [f"{VENV}/bin", f"{HOME}/.local/bin", f"{TOOLS}/bin", "/usr/local/sbin", "/usr/local/bin"]
    places += [path for path in ("/usr/local/go/bin",) if os.path.isdir(path)]
    places += ["/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    env = {
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "LOGNAME": "user",
        "PATH": ":".join(places),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_COMPILE": "1",  # a module is compiled when it is imported first: half the CPU time of an installation
        "SHELL": "/bin/bash",
        "USER": "user",
        "VIRTUAL_ENV": VENV,
        "npm_config_prefix": f"{HOME}/.local",
        "npm_config_update_notifier": "false",
    }
    pairs = tuple((key.encode(), value.encode()) for key, value in sorted({**dict(more), **env}.items()))
    return Place(Identity(USER_ID, USER_ID), HOME.encode(), b"/workspace", pairs, LOADER.encode())


def host_paths(tools: Path) -> list[HostPath]:
    found = [HostPath(Path("/usr"), "/usr")]
    # On a machine whose /bin is not merged into /usr, its directories are toolchain as well.
    for name in _MERGED:
        path = Path("/", name)
        if path.is_dir() and not path.is_symlink():
            found.append(HostPath(path, f"/{name}"))
    if tools.is_dir():
        # A link to the layer of the day: a sandbox keeps the one it started with.
        found.append(HostPath(tools.resolve(), TOOLS))
    return found


def _copy_etc(target: Path) -> None:
    names = [Path(name) for name in _ETC]
    for pattern in _ETC_PATTERNS:
        names += [path.relative_to("/etc") for path in sorted(Path("/etc").glob(pattern))]
    for name in names:
        source, copy = Path("/etc") / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            # The certificates and time zones that links lead to are below /usr, where they can be seen.
            copy.symlink_to(os.readlink(source))
        elif source.is_dir():
            # Only what all users can read: a private key beside the certificates stays outside.
            shutil.copytree(source, copy, symlinks=True, ignore=_ignore_private, copy_function=shutil.copyfile)
        elif source.is_file() and os.stat(source).st_mode & 0o004:
            shutil.copyfile(source, copy)


def _ignore_private(directory: str, names: list[str]) -> list[str]:
    ignored = []
    for name in names:
        status = os.lstat(os.path.join(directory, name))
        kind = status.st_mode & 0o170000
        if kind not in (0o100000, 0o040000, 0o120000) or (kind != 0o120000 and not status.st_mode & 0o004):
            ignored.append(name)
    return ignored


def _write_etc(target: Path) -> None:
    written = {
        "passwd": _PASSWD,
        "group": _GROUP,
        "hosts": _HOSTS,
        "hostname": "sandbox\n",
        "nsswitch.conf": _NSSWITCH,
        "resolv.conf": "",
        "host.conf": "multi on\n",
        "shells": "/bin/sh\n/bin/bash\n",
    }
    for name, text in written.items():
        (target / name).write_text(text)


def _write_venv(home: Path) -> None:
    """A virtual environment of the session's own, without the start-up cost of making one: pip itself comes from the
    tools layer through a .pth file, so that `pip install` works for the user whatever the machine's Python thinks of
    it. That puts it before the machine's own pip: the same one everywhere."""
    if not SYSTEM_PYTHON.exists():
        return
    version = os.path.basename(os.path.realpath(SYSTEM_PYTHON))  # python3.11
    venv = home / ".venv"
    packages = venv / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "include").mkdir()
    (venv / "lib64").symlink_to("lib")
    (venv / "bin" / "python3").symlink_to(SYSTEM_PYTHON)
    for name in ("python", version):
        (venv / "bin" / name).symlink_to("python3")
    number = version.removeprefix("python")
    (venv / "pyvenv.cfg").write_text(
        f"home = {SYSTEM_PYTHON.parent}\ninclude-system-site-packages = true\nversion = {number}\n"
    )
    (packages / "k8e_tools.pth").write_text(f"{TOOLS}/python\n")
    for name in _MATPLOTLIB:
        (packages / name).write_bytes(Path(__file__).with_name(name).read_bytes())
    (packages / "k8e_matplotlib.pth").write_text(f"import sys; {_FIND_MATPLOTLIB}\n")
    script = f"#!{VENV}/bin/python3\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
    for name in ("pip", "pip3"):
        (venv / "bin" / name).write_text(script)
        (venv / "bin" / name).chmod(0o755)


def build_root(target: Path, files: Iterable[tuple[str, bytes]] = ()) -> None:
    """Writes the private root as it is at a sandbox's start, owned by root but for what is the user's. `files` are
    more of them, by their path inside."""
    for name in _DIRECTORIES:
        (target / name).mkdir(parents=True)
    for name in _MERGED:
        path = Path("/", name)
        if path.is_symlink():
            (target / name).symlink_to(os.readlink(path).lstrip("/"))
        elif path.is_dir():
            (target / name).mkdir()
    for name in ("opt/k8e", "run/k8e", "home/user", "home/user/.local", "home/user/.local/bin", "home/user/.cache"):
        (target / name).mkdir(exist_ok=True)
    for name in ("k8e-agent", "k8e-loader.so"):
        (target / name).touch()
    _copy_etc(target / "etc")
    _write_etc(target / "etc")
    _write_venv(target / "home/user")
    for place, content in files:
        file = target / place.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # a link would be followed
        file.write_bytes(content)
    set_modes(target)
    for name, mode in {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "run/k8e": 0o700}.items():
        (target / name).chmod(mode)
    give_tree(target / "home/user", USER_ID, USER_ID)


def build_workspace(target: Path) -> None:
    """Makes what is mounted at /workspace: a directory of its own on the disk, so that other sandboxes can share it."""
    target.mkdir()
    target.chmod(0o755)  # whatever the umask is
    os.chown(target, USER_ID, USER_ID)
