"""The result of `k8e doctor`, of every engine: what was tried and found, and whether sandboxes are safe. Pure."""

from __future__ import annotations

import dataclasses
import enum
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k8e.engine import RuntimeReport


class Verdict(enum.Enum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one thing that was tried."""

    name: str
    verdict: Verdict
    tried: str
    found: str
    hint: str = ""  # what to do when it failed


@dataclass(frozen=True, slots=True)
class Examination:
    """The checks of one runtime; none when it is not available."""

    report: RuntimeReport
    checks: tuple[Check, ...] = ()

    @property
    def safe(self) -> bool:
        return self.report.available and not self.failed and any(check.verdict is Verdict.OK for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.verdict is Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Report:
    examinations: tuple[Examination, ...]
    seconds: float
    shared: tuple[Check, ...] | None = None  # of what all runtimes rest on: a cluster's; a machine has none

    @property
    def default(self) -> Examination | None:
        """The runtime of sandboxes for which none was asked: the strongest that works."""
        return next((each for each in self.examinations if each.report.available), None)

    @property
    def safe(self) -> bool:
        shared = all(check.verdict is not Verdict.FAILED for check in self.shared or ())
        return self.default is not None and self.default.safe and shared

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "safe": self.safe,
            "default": self.default.report.runtime.value if self.default else None,
            "seconds": round(self.seconds, 1),
            **({} if self.shared is None else {"cluster": [_to_json(check) for check in self.shared]}),
            "runtimes": [
                dataclasses.asdict(each.report)
                | {"runtime": each.report.runtime.value, "notes": list(each.report.notes), "safe": each.safe}
                | {"checks": [_to_json(check) for check in each.checks]}
                for each in self.examinations
            ],
        }


def _to_json(check: Check) -> dict[str, Any]:
    return dataclasses.asdict(check) | {"verdict": check.verdict.value}


def render(report: Report, width: int = 100) -> str:
    """Renders for people: a line for each control that holds, and for others also what to do."""
    lines: list[str] = []
    if report.shared is not None:
        lines += ["cluster:", *_list(report.shared, width), ""]
    for each in report.examinations:
        default = " (default)" if each is report.default else ""
        lines.append(f"{each.report.runtime.value}{default}: {_headline(each)}")
        lines += _indent(each.report.notes, width)
        lines += [*_list(each.checks, width), ""]
    lines.append(_conclusion(report))
    return "\n".join(lines) + "\n"


def _list(checks: Sequence[Check], width: int) -> Iterator[str]:
    for check in checks:
        yield from _wrap(f"  {check.verdict.value:<8}{check.name:<20}", check.found, width)
        if check.verdict is Verdict.FAILED:
            yield from _wrap(" " * 30, f"tried: {check.tried}", width)
            yield from _wrap(" " * 30, f"do: {check.hint}", width) if check.hint else ()


def _headline(each: Examination) -> str:
    if not each.report.available:
        return f"not available: {each.report.reason}" + (f"; {each.report.hint}" if each.report.hint else "")
    if each.failed:
        state = f"NOT SAFE: {len(each.failed)} of {len(each.checks)} checks failed"
    else:
        state = "every control holds" if each.safe else "works; its controls were not tried"
    return f"{each.report.version}, {state}"


def _conclusion(report: Report) -> str:
    if report.default is None:
        return "No runtime works here: no sandbox can be started."
    name = report.default.report.runtime.value
    failed = [check.name for check in report.shared or () if check.verdict is Verdict.FAILED]
    if failed:
        return f"NOT SAFE: of the cluster, {', '.join(failed)} failed."
    if report.safe:
        return f"Safe: sandboxes run with {name}. Tried in {report.seconds:.1f} s."
    return f"NOT SAFE: sandboxes would run with {name}, and not all of its controls hold."


def _indent(texts: Sequence[str], width: int) -> list[str]:
    return [line for text in texts for line in _wrap("  ", text, width)]


def _wrap(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * len(start)) or [start.rstrip()]
