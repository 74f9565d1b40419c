"""Plans: how they are made, read, and asked."""

from __future__ import annotations

import difflib
import functools
import json
import os
import pathlib
from typing import Any, Literal, overload

from . import _ithaca
from ._errors import IthacaError, option

__all__ = ["Plan", "plan", "load"]


@functools.lru_cache(maxsize=None)
def _known(command: str) -> dict[str, bool]:
    """The options of a command, and whether each takes a value."""
    return {name: takes_value for name, takes_value, _ in _ithaca.options(command)}


def _arguments(command: str, keywords: dict[str, Any]) -> list[str]:
    """Keywords as arguments of the command line."""
    known, arguments = _known(command), []
    for key, value in keywords.items():
        name = option(key)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{near[0].replace('-', '_')}`?" if near else ""
            raise TypeError(f"{command}() got an unexpected keyword argument `{key}`{hint}")
        if value is None or value is False:
            continue
        if value is True:
            if known[name]:
                raise TypeError(f"`{key}` of {command}() takes a value")
            arguments.append(f"--{name}")
            continue
        if not known[name]:
            raise TypeError(f"`{key}` of {command}() is True or False")
        if isinstance(value, dict):
            value = ",".join(f"{axis}={size}" for axis, size in value.items())
        if isinstance(value, (set, frozenset)):
            value = sorted(value)
        values = value if isinstance(value, (list, tuple)) else [value]
        arguments += [f"--{name}={os.fspath(v) if isinstance(v, os.PathLike) else v}" for v in values]
    return arguments


def plan(
    model: Any,
    *,
    cluster: str | os.PathLike[str] | None = None,
    gpus: int | None = None,
    seq: int | str | None = None,
    batch: int | None = None,
    mode: str | None = None,
    strategy: str | None = None,
    mesh: str | dict[str, int] | None = None,
    **options: Any,
) -> "Plan":
    """Chooses how to distribute a model, as `ithaca plan` does.

    `model` is a folder with `config.json`, the path of such a file, the configuration as a dict, or a configuration or model
    of transformers. Every other option of `ithaca plan --help` is a keyword too, with `_` for `-`: `max_tp=8`,
    `only=["ulysses", "ring"]`, `pad_heads=True`.

    Raises `IthacaError` where nothing satisfies the request.
    """
    keywords = dict(cluster=cluster, gpus=gpus, seq=seq, batch=batch, mode=mode, strategy=strategy, mesh=mesh, **options)
    arguments = _arguments("plan", keywords)
    if isinstance(model, (str, os.PathLike)):
        raw, notes = _ithaca.plan(arguments, path=os.fspath(model))
    else:
        name, config = _described(model)
        try:
            text = json.dumps(config, allow_nan=False)
        except ValueError as error:
            raise IthacaError.of(f"the configuration of `{name}` cannot be written as JSON: {error}") from error
        raw, notes = _ithaca.plan(arguments, name=name, json=text)
    return Plan(raw, notes)


def _described(model: Any) -> tuple[str, dict[str, Any]]:
    """The name and the configuration of a model that is no path."""
    if isinstance(model, dict):
        return str(model.get("_name_or_path") or model.get("model_type") or "model"), model
    config = getattr(model, "config", model)
    if not hasattr(config, "to_json_string"):
        raise TypeError(
            f"a {type(model).__name__} is no model: pass a path, a dict, or a configuration or model of transformers"
        )
    # Without values that are left at their defaults, as the library writes `config.json`.
    described = json.loads(config.to_json_string(use_diff=True))
    described["architectures"] = getattr(config, "architectures", None) or [type(model).__name__]
    if config is model and not config.architectures:
        del described["architectures"]
    return getattr(config, "name_or_path", "") or config.model_type, described


def load(path: str | os.PathLike[str]) -> "Plan":
    """Reads a plan that `Plan.save` or `ithaca plan -o` wrote."""
    return Plan.load(path)


class Plan:
    """A checked parallel plan. Its document is `plan.json` (docs/book/src/plan.schema.json)."""

    def __init__(self, raw: Any, notes: list[str] | None = None) -> None:
        self._raw = raw
        self._notes = notes or []

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Plan":
        """Reads a file."""
        return Plan(_ithaca.read(os.fspath(path), pathlib.Path(path).read_text(encoding="utf-8")))

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Reads a document."""
        return Plan(_ithaca.read("plan.json", text))

    def to_json(self) -> str:
        """The document, as `ithaca plan --json` prints it."""
        return str(self._raw.json())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the document to a file."""
        pathlib.Path(path).write_text(self.to_json(), encoding="utf-8")

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """The document as a dict."""
        return dict(json.loads(self.to_json()))

    @property
    def model(self) -> dict[str, Any]:
        """Name, digest and configuration of the model."""
        return dict(self.document["model"])

    @property
    def strategy(self) -> str:
        """The strategy, or product of strategies."""
        return str(self.document["strategy"])

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and their sizes, major to minor."""
        return {axis["axis"]: axis["size"] for axis in self.document["mesh"]}

    @property
    def gpus(self) -> int:
        """Ranks."""
        return int(self.document["gpus"])

    @property
    def workload(self) -> dict[str, Any]:
        """Mode, sequences, tokens, element type."""
        return dict(self.document["workload"])

    @property
    def layout(self) -> dict[str, Any]:
        """Strategy, mesh, options, dimensions with their token orders, and the movement of each attention."""
        names = ("strategy", "mesh", "options", "dimensions", "attention")
        return {**{name: self.document[name] for name in names}, "mesh": self.mesh}

    @property
    def step_seconds(self) -> float:
        """Time of a step, seconds."""
        return float(self.document["time"]["step_seconds"])

    @property
    def memory_bytes(self) -> int:
        """Memory of the busiest rank."""
        return int(self.document["memory"]["total"])

    @property
    def notes(self) -> list[str]:
        """What the user should know, options without effect included."""
        return [*self.document["notes"], *self._notes]

    @property
    def alternatives(self) -> list[dict[str, Any]]:
        """A flat row per layout that was tried, the best first: `pandas.DataFrame(plan.alternatives)`."""
        rows = []
        for tried in self.document["alternatives"]:
            outcome = tried["outcome"]
            figures = {key: value for key, value in outcome.items() if key != "is" and not isinstance(value, (dict, list))}
            mesh = ",".join(f"{axis['axis']}={axis['size']}" for axis in tried["mesh"])
            flags = tried.get("flags", "")
            row = {"strategy": tried["strategy"], "mesh": mesh, "flags": flags, "outcome": outcome["is"], **figures}
            rows.append(row)
        return rows

    def explain(self, **options: Any) -> str:
        """Communication, time, memory, and why the alternatives lost; options of `ithaca explain`, as `top=3`."""
        return str(self._raw.explain(_arguments("explain", options)))

    def verify(self, **options: Any) -> str:
        """Compares the per-rank program with the whole program in double precision; options of `ithaca verify`.

        Returns the table of errors. Raises `IthacaError` where the programs differ.
        """
        passed, text = self._raw.verify(_arguments("verify", options))
        if not passed:
            raise IthacaError.of(f"the per-rank program differs from the whole program\n{text}")
        return str(text)

    @overload
    def emit(
        self, target: Literal["cuda"], output: str | os.PathLike[str] | None = None, **options: Any
    ) -> dict[str, str]: ...
    @overload
    def emit(
        self,
        target: Literal["ir", "schedule", "json", "dot", "svg", "mermaid", "trace", "torch"],
        output: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> str: ...
    @overload
    def emit(self, target: str, output: str | os.PathLike[str] | None = None, **options: Any) -> str | dict[str, str]: ...
    def emit(self, target: str, output: str | os.PathLike[str] | None = None, **options: Any) -> str | dict[str, str]:
        """The plan as code: `ir`, `schedule`, `json`, `dot`, `svg`, `mermaid`, `trace`, `cuda`, `torch`.

        Returns the text, or a dict of files by path for `cuda`; writes it to `output` too, a file or a folder.
        """
        files = self._raw.emit(_arguments("emit", {"target": target, **options}))
        texts = {path: contents.decode() for path, contents in files}
        if output is not None:
            for path, text in texts.items():
                file = pathlib.Path(output, path or "")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
        return texts[None] if None in texts else texts

    def export(self, to: str, output: str | os.PathLike[str] | None = None, **options: Any) -> str:
        """The plan in the words of another framework, as `ithaca export --to megatron`; writes the text to `output` too.

        Raises `IthacaError` with each reason where the framework cannot run the plan; `nearest=True` exports the nearest
        layout that it can, and the text names each difference.
        """
        text = str(self._raw.export(_arguments("export", {"to": to, **options})))
        if output is not None:
            pathlib.Path(output).write_text(text, encoding="utf-8")
        return text

    def __repr__(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one rank"
        return f"<ithaca.Plan {self.model['name']}: {self.strategy} {mesh}, {self.step_seconds:.4g} s>"

    def __reduce__(self) -> Any:
        return Plan.from_json, (self.to_json(),)
