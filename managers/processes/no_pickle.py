"""Unpickling switched off for a process.

numpy, torch and the standard library import the module pickle, so its absence cannot be asked for. Nothing of ours uses it, as a
test of the house says; this makes it impossible for a library on our behalf, too.
"""

from __future__ import annotations

import sys
from typing import Any


class PickleRefusedError(RuntimeError):
    """Somebody tried to unpickle an object in a process that must not."""


def forbid_unpickling() -> None:
    """From now on unpickling anything that names a class or function raises PickleRefusedError. There is no way back."""
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        raise PickleRefusedError(f"unpickling {arguments[0]}.{arguments[1]} is refused in this process")
