"""Imports of packages that warn while they are imported."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def import_quietly(name: str) -> ModuleType:
    """A module, without the warnings of its import: flashinfer's dependencies give dozens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
