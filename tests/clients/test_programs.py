"""Claude Code, Codex and Gemini themselves, without an account: our installer configures them, a model on loopback asks
for a call of our tool, the code runs in a sandbox, and its result is in the next request to the model."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.clients.model import FINISHED, Call, Model, serve_model
from tests.clients.user import User
from tests.mcp.test_http import listening

pytestmark = [
    pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here"),
    pytest.mark.timeout(1800),  # the first run on a machine downloads the programs
]

PROMPT = "Run the program in a sandbox."
# Without a timeout of its own Gemini takes a server for dead after some seconds, which says how busy the machine is.
GEMINI = """{
  "security": {"auth": {"selectedType": "gemini-api-key"}},
  "privacy": {"usageStatisticsEnabled": false},
  "mcpServers": {"k8e-sandbox": {"timeout": 120000}}
}
"""


@pytest.fixture
def word() -> str:
    """That only the code which runs can have reversed."""
    return secrets.token_hex(16)


@pytest.fixture
def model(word: str) -> Iterator[Model]:
    code = f"print('{word}'[::-1])"
    with serve_model(Call("sandbox_run", {"code": code, "language": "python"})) as made:
        yield made


TRUST = {"GEMINI_CLI_TRUST_WORKSPACE": "true"}


def install(user: User, agent: str, **more: str) -> str:
    """What the program says about the server afterwards."""
    told = user.install("k8e", "sandbox-install-skill", agent, **more)
    return str(told["agents"][0]["client"]["status"])


def prepare_gemini(home: Path) -> None:
    settings = home / ".gemini" / "settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(GEMINI)


def run_claude(user: User, model: Model, *options: str) -> CompletedProcess[str]:
    provider = {"ANTHROPIC_BASE_URL": model.url, "ANTHROPIC_API_KEY": "none"}
    return user.run(["claude", "-p", PROMPT, *options], ENABLE_TOOL_SEARCH="false", **provider)


def check(user: User, model: Model, word: str, stdout: str) -> None:
    assert any(name.endswith("sandbox_run") for name in model.offered), sorted(model.offered)
    assert model.results, "the call has not come to an end"
    assert word[::-1] in model.results[0], model.results
    log = (user.machine.folder / "s" / "audit.log").read_text()
    ended = [record for record in map(json.loads, log.splitlines()) if record["event"] == "run_ended"]
    assert [run for run in ended if run["session"] in model.results[0]], "it has not run in a sandbox"
    assert FINISHED in stdout
    # The skill is one of those that the program tells its model about.
    assert "k8e-sandbox-skill" in json.dumps(model.requests)


def test_claude(user: User, model: Model, word: str) -> None:
    assert install(user, "claude") == "connected"
    done = run_claude(user, model, "--allowedTools", "mcp__k8e-sandbox__sandbox_run")
    assert done.returncode == 0, done
    check(user, model, word, done.stdout)


def test_codex(user: User, model: Model, word: str) -> None:
    assert install(user, "codex") == "listed"
    provider = f'{{name = "stub", base_url = "{model.url}/v1", wire_api = "responses", env_key = "STUB_KEY"}}'
    settings = {
        "model": '"stub"',  # with a name that Codex knows, tools are called by a program that the model writes
        "model_provider": '"stub"',
        "model_providers.stub": provider,
        "mcp_servers.k8e-sandbox.default_tools_approval_mode": '"approve"',
        "mcp_servers.k8e-sandbox.required": "true",  # else it begins without a server that is not ready at once
        "mcp_servers.k8e-sandbox.startup_timeout_sec": "120",
    }
    words = [each for name, value in settings.items() for each in ("-c", f"{name}={value}")]
    # It looks for plugins and news in the network. That fails at once: no proxy listens there.
    nowhere = dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:1")
    done = user.run(["codex", "exec", "--skip-git-repo-check", *words, PROMPT], STUB_KEY="none", **nowhere)
    assert done.returncode == 0, done
    check(user, model, word, done.stdout)


def test_gemini(user: User, model: Model, word: str) -> None:
    prepare_gemini(user.home)
    assert install(user, "gemini", **TRUST) == "connected"
    done = user.run(
        ["gemini", "-p", PROMPT, "-m", "gemini-2.5-flash", "--approval-mode", "yolo"],
        GEMINI_API_KEY="none",
        GOOGLE_GEMINI_BASE_URL=model.url,
        GEMINI_CLI_NO_RELAUNCH="true",
        **TRUST,
    )
    assert done.returncode == 0, done
    check(user, model, word, done.stdout)


def test_the_plugin_gives_claude_its_permissions(user: User, word: str) -> None:
    """Without an option of Claude that would allow the tool."""
    told = user.install("agentkernel", "plugin", "install", "claude", "--global", "--json")
    assert told["client"]["status"] == "connected", told
    command = ["python3", "-c", f"print('{word}'[::-1])"]
    with serve_model(Call("sandbox_run", {"command": command, "image": "host", "network": False})) as model:
        done = run_claude(user, model)
    assert done.returncode == 0, done
    assert "mcp__agentkernel__sandbox_run" in model.offered
    assert word[::-1] in model.results[0]


def test_the_plugins_are_what_the_programs_read(user: User) -> None:
    """Claude waits for the user's consent to a project's server, and Gemini for trust in the folder."""
    told = user.install("agentkernel", "plugin", "install", "claude", "--global", "--json")
    assert told["client"]["status"] == "connected", told
    assert told["server"]["command"].startswith("/")
    user.install("agentkernel", "plugin", "install", "claude", "--global", "--uninstall", "--json")
    assert "agentkernel" not in (user.home / ".claude.json").read_text()
    told = user.install("agentkernel", "plugin", "install", "claude", "--json")
    assert told["client"]["status"] == "waiting", told
    told = user.install("agentkernel", "plugin", "install", "gemini", "--json")
    assert told["client"]["status"] == "waiting", told
    told = user.install("agentkernel", "plugin", "install", "codex", "--json")
    assert told["client"]["status"] == "listed", told


def test_a_server_that_runs_already(user: User) -> None:
    prepare_gemini(user.home)
    with listening(user.machine) as url:
        assert install(user, "claude", K8E_SANDBOX_MCP_ADDR=url) == "connected"
        assert install(user, "gemini", K8E_SANDBOX_MCP_ADDR=url, **TRUST) == "connected"
        assert install(user, "codex", K8E_SANDBOX_MCP_ADDR=url) == "listed"


def test_variables_that_move_the_programs_files(user: User) -> None:
    elsewhere = user.home / "elsewhere"
    elsewhere.mkdir()
    prepare_gemini(elsewhere)
    assert install(user, "claude", CLAUDE_CONFIG_DIR=str(elsewhere)) == "connected"
    assert install(user, "gemini", GEMINI_CLI_HOME=str(elsewhere), **TRUST) == "connected"
    assert install(user, "codex", CODEX_HOME=str(elsewhere)) == "listed"
    assert not {name for name in (".claude.json", ".gemini", ".codex") if (user.home / name).exists()}
