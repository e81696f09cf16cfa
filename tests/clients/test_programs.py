"""Claude Code, Codex and Gemini themselves, without an account: our installer configures them, a model on loopback asks
for a call of our tool, the code runs in a sandbox, and its result is in the next request to the model."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest

from tests.clients.model import FINISHED, Call, Model, serve_model
from tests.clients.user import User

PROMPT = "Run the program in a sandbox."


@pytest.fixture
def word() -> str:
    """That only the code which runs can have reversed."""
    return secrets.token_hex(16)


@pytest.fixture
def model(word: str) -> Iterator[Model]:
    code = f"print('{word}'[::-1])"
    with serve_model(Call("sandbox_run", {"code": code, "language": "python"})) as made:
        yield made


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
    told = user.install("k8e", "sandbox-install-skill", "claude")
    assert told["agents"][0]["client"]["status"] == "connected", told
    done = user.run(
        ["claude", "-p", PROMPT, "--allowedTools", "mcp__k8e-sandbox__sandbox_run"],
        ANTHROPIC_BASE_URL=model.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        MCP_TIMEOUT="120000",
        MCP_CONNECTION_NONBLOCKING="0",
        ENABLE_TOOL_SEARCH="false",
    )
    assert done.returncode == 0, done
    check(user, model, word, done.stdout)


def test_codex(user: User, model: Model, word: str) -> None:
    told = user.install("k8e", "sandbox-install-skill", "codex")
    assert told["agents"][0]["client"]["status"] == "listed", told
    provider = f'{{name = "stub", base_url = "{model.url}/v1", wire_api = "responses", env_key = "STUB_KEY"}}'
    settings = {
        "model": '"stub"',  # with a name that Codex knows, tools are called by a program that the model writes
        "model_provider": '"stub"',
        "model_providers.stub": provider,
        "mcp_servers.k8e-sandbox.default_tools_approval_mode": '"approve"',
        "mcp_servers.k8e-sandbox.startup_timeout_sec": "120",
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    done = user.run(["codex", "exec", "--skip-git-repo-check", *words, PROMPT], STUB_KEY="none")
    assert done.returncode == 0, done
    check(user, model, word, done.stdout)


def test_gemini(user: User, model: Model, word: str) -> None:
    settings = user.home / ".gemini" / "settings.json"
    settings.parent.mkdir()
    settings.write_text('{"security": {"auth": {"selectedType": "gemini-api-key"}}}')
    told = user.install("k8e", "sandbox-install-skill", "gemini", GEMINI_CLI_TRUST_WORKSPACE="true")
    assert told["agents"][0]["client"]["status"] == "connected", told
    done = user.run(
        ["gemini", "-p", PROMPT, "-m", "gemini-2.5-flash", "--approval-mode", "yolo"],
        GEMINI_API_KEY="none",
        GOOGLE_GEMINI_BASE_URL=model.url,
        GEMINI_CLI_TRUST_WORKSPACE="true",
        GEMINI_CLI_NO_RELAUNCH="true",
    )
    assert done.returncode == 0, done
    check(user, model, word, done.stdout)


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
