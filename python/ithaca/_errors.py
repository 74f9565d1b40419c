"""The exception of every refusal."""

from __future__ import annotations

from typing import Any

__all__ = ["IthacaError", "keyword", "option"]


def option(keyword: str) -> str:
    """`max_tp` as an option of the command line, without dashes in front."""
    return keyword.replace("_", "-")


def keyword(option: str) -> str:
    """The reverse of `option`."""
    return option.lstrip("-").replace("-", "_")


def _keywords(arguments: list[str]) -> dict[str, Any]:
    """Arguments of the command line as keywords."""
    found: dict[str, Any] = {}
    rest = iter(arguments)
    pending: str | None = None
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            pending = keyword(name)
            given: Any = value if equals else True
        else:
            given = word
        if isinstance(given, str) and given.isdigit():
            given = int(given)
        assert pending is not None, "a value follows its option"
        before = found.get(pending)
        if word.startswith("--") and before is not None:
            found[pending] = [*(before if isinstance(before, list) else [before]), given]
        else:
            found[pending] = given
    return found


class IthacaError(Exception):
    """A request that is refused.

    `code` is that of docs/book/src/diagnostics.md, or `PY` for a refusal of this package. `repairs` are keywords for `ithaca.plan`,
    each of which makes a legal request: `ithaca.plan(model, **error.repairs[0])`.
    """

    code: str
    message: str
    helps: list[str]
    repairs: list[dict[str, Any]]

    def __init__(
        self,
        diagnostics: list[tuple[str, str, list[str]]],
        repairs: list[list[str]] | None = None,
    ) -> None:
        self.diagnostics = diagnostics
        self.code, self.message, self.helps = diagnostics[0]
        self.repairs = [_keywords(arguments) for arguments in repairs or []]
        super().__init__(diagnostics, repairs)

    @classmethod
    def of(cls, message: str, *helps: str) -> "IthacaError":
        """A refusal of this package."""
        return cls([("PY", message, list(helps))])

    def __str__(self) -> str:
        lines = []
        for code, message, helps in self.diagnostics:
            lines.append(f"[{code}] {message}")
            lines += [f"  help: {text}" for text in helps]
        if self.repairs:
            lines.append("  any of these works:")
        for repair in self.repairs:
            lines.append("    ithaca.plan(model, " + ", ".join(f"{k}={v!r}" for k, v in repair.items()) + ")")
        return "\n".join(lines)
