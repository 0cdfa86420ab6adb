"""Every exception that a program can meet."""

from __future__ import annotations

from typing import Any

from ..managers.errors import BanyanError


class LangError(BanyanError):
    """Base of the language's exceptions."""


class UnsupportedError(LangError):
    """A program needs what its backend cannot do. ``feature`` names it; nothing was sent."""

    def __init__(self, feature: str, backend: str, reason: str) -> None:
        super().__init__(f"{backend} cannot run this program: {feature}: {reason}")
        self.feature = feature


class BackendError(LangError):
    """A backend refused or failed a call. ``status`` is the HTTP status, None where there was no answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class StepError(LangError):
    """A step of a program failed: ``step`` says which, ``program`` whose, ``__cause__`` why.

    It is raised wherever the program looks at what the failed state has: s[name], s.text(), s += ..., join, the end of run.
    """

    def __init__(self, step: str, program: str, reason: object) -> None:
        super().__init__(f"{program}, step {step}: {reason}")
        self.step = step
        self.program = program


class ProgramError(LangError):
    """A program's own code raised; ``__cause__`` is what it raised. Only run_batch and stream wrap it so."""


class VariableError(LangError, KeyError):
    """A program asks for a variable that no step of it writes."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoBackendError(LangError):
    """No backend was given and no default is set."""

    def __init__(self) -> None:
        super().__init__("no backend: call set_default_backend(...) or pass backend=...")


def require_package(name: str, extra: str) -> Any:
    """Import an optional package. Raises LangError that says how to install it."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise LangError(f"the package {name!r} is not installed: pip install 'banyan-engine[{extra}]'") from None
