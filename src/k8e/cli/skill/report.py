"""The report of an installation, for a person."""

from __future__ import annotations

from typing import Any


def list_lines(report: dict[str, Any], *, dry_run: bool) -> list[str]:
    """For one AI agent: what became of each file, notes, and the word of the AI agent's own program."""
    mark = " (dry run)" if dry_run else ""
    lines = [f"{each['path']}: {each['action']}{mark}" for each in report["files"]]
    lines += report.get("notes", ())
    if client := report.get("client"):
        lines.append(f"{report['agent']} says: {client['said'] or client['status']}")
        lines += [f"  hint: {client['hint']}"] if "hint" in client else []
    return lines
