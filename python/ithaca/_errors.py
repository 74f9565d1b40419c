"""The exception of every refusal."""

from __future__ import annotations

from keyword import iskeyword
from typing import Any

__all__ = ["IthacaError", "keyword", "option"]


def option(keyword: str) -> str:
    """`max_tp` as an option of the command line, without dashes in front; `for_` is `for`."""
    return keyword.rstrip("_").replace("_", "-")


def keyword(option: str) -> str:
    """The reverse of `option`."""
    name = option.lstrip("-").replace("-", "_")
    return f"{name}_" if iskeyword(name) else name


def _keywords(arguments: list[str]) -> dict[str, Any]:
    """Arguments of the command line as keywords."""
    pairs: list[tuple[str, Any]] = []
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            pairs.append((keyword(name), value if equals else True))
        else:
            # The value of the option before it.
            pairs[-1] = (pairs[-1][0], word)
    found: dict[str, Any] = {}
    for name, value in pairs:
        value = int(value) if isinstance(value, str) and value.isdigit() else value
        before = found.get(name)
        found[name] = value if before is None else [*(before if isinstance(before, list) else [before]), value]
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
