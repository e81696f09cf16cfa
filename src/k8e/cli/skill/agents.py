"""The AI agents that the installers know, and their files: where each program looks for MCP servers and skills."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NAMES: Final = ("kiro", "claude", "gemini", "codex", "cursor", "windsurf")
# Codex reads a project's file only where the user trusts the project, Windsurf has none.
WITHOUT_PROJECT: Final = ("codex", "windsurf")


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    configs: tuple[Path, ...]  # each gets the entry
    skills: Path
    within: Path | None = None  # where its files must lie: the project
    url_key: str = "url"
    typed: bool = False  # wants to be told that a url is HTTP


def find_agent(name: str, *, project: bool) -> Agent:
    """The files for this folder (`project`), or for all projects of the user."""
    home, here = Path.home(), Path.cwd()
    project = project and name not in WITHOUT_PROJECT
    root, within = (here, here) if project else (home, None)
    if name == "kiro":
        # The first is what the program reads; the second is what k8e's documents name.
        more = (root / ".kiro" / "settings.json",) if project else ()
        return Agent(name, (root / ".kiro" / "settings" / "mcp.json", *more), root / ".kiro" / "skills", within)
    if name == "claude":
        folder = here / ".claude" if project else find_claude_folder()
        servers = here / ".mcp.json" if project else find_claude_config()
        return Agent(name, (servers,), folder / "skills", within, typed=True)
    if name == "gemini":
        folder = (here if project else Path(os.environ.get("GEMINI_CLI_HOME") or home)) / ".gemini"
        return Agent(name, (folder / "settings.json",), folder / "skills", within, typed=True)
    if name == "codex":
        folder = Path(os.environ.get("CODEX_HOME") or home / ".codex")
        return Agent(name, (folder / "config.toml",), folder / "skills")
    if name == "cursor":
        return Agent(name, (root / ".cursor" / "mcp.json",), root / ".cursor" / "skills", within)
    folder = home / ".codeium" / "windsurf"
    return Agent(name, (folder / "mcp_config.json",), folder / "skills", url_key="serverUrl")


def find_claude_folder() -> Path:
    return Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")


def find_claude_config() -> Path:
    """Beside the folder in a home, and inside the one that the variable names."""
    return Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home()) / ".claude.json"
