"""What is wrong with a wish or a file, for whoever has to put it right."""

from __future__ import annotations


class Problem(Exception):
    def __init__(self, code: str, error: str, *, detail: str = "", hint: str = "") -> None:
        self.code = code
        self.error = error
        self.detail = detail
        self.hint = hint
        super().__init__(f"{code}: {error}" + (f" ({detail})" if detail else ""))

    @property
    def body(self) -> dict[str, str]:
        """As every error of ours looks."""
        return {"error": self.error, "detail": self.detail, "code": self.code, "hint": self.hint}
