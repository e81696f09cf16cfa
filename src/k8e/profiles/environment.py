"""Chooses the variables that a permissive sandbox gets: all but those that describe the machine's own session and those
that look like credentials, by name or by value. Pure."""

from __future__ import annotations

from k8e.profiles.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_KEYS = 64  # the service takes no more (docs/http-api.md)
MAX_BYTES = 32 << 10
ROOM = 8  # for --env and for the variables that the policy sets


def list_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Variables that describe the machine and would be wrong inside.
SESSION = list_words("""
    PATH HOME USER LOGNAME USERNAME SHELL PWD OLDPWD SHLVL _ HOSTNAME HOST HOSTTYPE MACHTYPE OSTYPE MAIL TMPDIR TMP TEMP
    TEMPDIR DISPLAY WAYLAND_DISPLAY XAUTHORITY WINDOWID SESSION_MANAGER DESKTOP_SESSION STY TMUX TMUX_PANE TTY GPG_TTY
    VIRTUAL_ENV CONDA_PREFIX PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONEXECUTABLE NODE_PATH RUBYOPT RUBYLIB GEM_HOME
    GEM_PATH PERL5LIB PERL5OPT JAVA_HOME JAVA_TOOL_OPTIONS NODE_OPTIONS BASH_ENV ENV PROMPT_COMMAND IFS CDPATH
    KUBECONFIG DOCKER_HOST DOCKER_CONFIG CONTAINER_HOST REGISTRY_AUTH_FILE NOTIFY_SOCKET LISTEN_FDS LISTEN_PID
    INVOCATION_ID JOURNAL_STREAM MANAGERPID EDITOR VISUAL PAGER BROWSER XPC_SERVICE_NAME WSL_INTEROP GIT_ASKPASS
    GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_EXEC_PATH GIT_SSH GIT_SSH_COMMAND LS_COLORS
""")
SESSION_STARTS = list_words("""
    XDG_ DBUS_ SSH_ GPG_ LD_ DYLD_ SUDO_ VSCODE_ KITTY_ ITERM_ K8E_ AGENTKERNEL_ PYENV_ NVM_ SDKMAN_ CONDA_ BASH_FUNC_
    SYSTEMD_ GNOME_ KDE_
""")
# Vendors whose variables are credentials or lead to them.
VENDORS = list_words("""
    AWS_ AZURE_ ARM_ GOOGLE_ GCP_ GCLOUD_ CLOUDSDK_ GH_ GITHUB_ GITLAB_ CI_ ANTHROPIC_ CLAUDE OPENAI_ CODEX_ GEMINI_
    MISTRAL_ GROQ_ HF_ HUGGING COHERE_ NPM_ YARN_ PIP_ UV_ POETRY_ TWINE_ CARGO_REGISTR VAULT_ OP_ BW_ DOCKER_ HEROKU_
    FLY_ VERCEL_ NETLIFY_ CLOUDFLARE_ CF_ DIGITALOCEAN_ SLACK_ STRIPE_ TWILIO_ SENDGRID_ SENTRY_ DATADOG_ DD_ SNYK_
    PULUMI_ TF_VAR_ KUBE SNOWFLAKE_
""")
# Words between underscores in names of credentials.
WORDS = list_words("""
    KEY KEYS APIKEY TOKEN TOKENS SECRET SECRETS PASSWORD PASSWORDS PASSWD PASS PASSPHRASE PWD CREDENTIAL CREDENTIALS
    CREDS CRED AUTH AUTHORIZATION COOKIE COOKIES PRIVATE JWT BEARER PAT DSN SIGNING ENCRYPTION SALT OTP PIN CERT LICENSE
""")
PARTS = list_words("TOKEN SECRET PASSW APIKEY CREDENTIAL PRIVATEKEY ACCESSKEY")
# The beginnings of credentials, whatever the variable's name.
VALUES = list_words("""
    -----BEGIN ghp_ gho_ ghs_ github_pat_ glpat- sk- xoxb- xoxp- AKIA ASIA hf_ npm_ pypi- eyJ AIza dop_v1_ sk_live_
    rk_live_
""")


class Passed(Record):
    given: tuple[tuple[str, str], ...] = ()
    withheld: tuple[str, ...] = ()  # names: they describe the machine or are credentials
    left_out: tuple[str, ...] = ()  # names: there is no room


def is_session(name: str) -> bool:
    return name in SESSION or name.startswith(SESSION_STARTS)


def is_credential(name: str, value: str) -> bool:
    upper = name.upper()
    if upper.startswith(VENDORS) or any(part in upper.replace("_", "") for part in PARTS):
        return True
    return any(word in WORDS for word in upper.split("_")) or value.startswith(VALUES) or _has_login(value)


def _has_login(value: str) -> bool:
    """Whether the value has a URL with a password: https://user:password@host/."""
    return any("@" in part.partition("/")[0] for part in value.split("://")[1:])


def pass_environment(environ: Mapping[str, str]) -> Passed:
    given: list[tuple[str, str]] = []
    withheld: list[str] = []
    left_out: list[str] = []
    size = 0
    for name, value in sorted(environ.items()):
        if is_session(name) or is_credential(name, value) or not _is_variable(name):
            withheld.append(name)
            continue
        cost = len(name.encode("utf-8", "surrogateescape")) + len(value.encode("utf-8", "surrogateescape")) + 2
        if len(given) >= MAX_KEYS - ROOM or size + cost > MAX_BYTES // 2:
            left_out.append(name)
            continue
        size += cost
        given.append((name, value))
    return Passed(tuple(given), tuple(withheld), tuple(left_out))


def _is_variable(name: str) -> bool:
    return name.isascii() and name.isidentifier()
