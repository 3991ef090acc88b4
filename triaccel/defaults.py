"""The table of every default: ``python -m triaccel.defaults > docs/defaults.md``. A test keeps the page equal to the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .config import TriAccelConfig

__all__ = ["markdown"]


def markdown() -> str:
    """One Markdown table over all configurations: name, default, allowed values, meaning with unit and source."""
    lines = [
        "# Every default",
        "",
        'Made by `python -m triaccel.defaults`; "ours" marks values that the paper\'s public text does not give.',
        "",
        "| field | default | allowed | meaning, unit, source |",
        "|---|---|---|---|",
    ]
    for path, field in _fields(TriAccelConfig, ""):
        about = " ".join((field.description or "").split()).replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{path}` | `{_default(field)}` | {_allowed(field)} | {about} |")
    return "\n".join(lines) + "\n"


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(field: FieldInfo) -> str:
    bounds = []
    for rule in field.metadata:
        for sign, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
            if (limit := getattr(rule, name, None)) is not None:
                bounds.append(f"{sign} {limit:g}")
    kind = _kind(field.annotation)
    return f"{kind}, {', '.join(bounds)}" if bounds else kind


def _kind(annotation: Any) -> str:
    arguments = get_args(annotation)
    if arguments and all(isinstance(a, str) for a in arguments):
        return " / ".join(f"`{a}`" for a in arguments)
    if get_origin(annotation) is tuple:
        return f"list of {_kind(arguments[0])}"
    if get_origin(annotation) is dict:
        return "table of patterns"
    if arguments and type(None) in arguments:
        return f"{_kind(next(a for a in arguments if a is not type(None)))} or none"
    if type(annotation).__name__ == "_AnnotatedAlias":
        return _kind(arguments[0])
    return str(getattr(annotation, "__name__", annotation)).lower()


if __name__ == "__main__":
    print(markdown(), end="")
