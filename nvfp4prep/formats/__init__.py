"""A `Report` for machines: one module per format, each with `render(report)`, which gives the whole text. No printing.

Names and messages come from checkpoints, and may hold anything. What is meant to be read by a person has its control
characters escaped as Python does (`findings.printable`); on top of that each format escapes what is special in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nvfp4prep.formats import github, json_report, junit, sarif
from nvfp4prep.validation import Report

FORMATS: Mapping[str, Callable[[Report], str]] = {
    "json": json_report.render,
    "junit": junit.render,
    "sarif": sarif.render,
    "github": github.render,
}
"""By the name that `--format` takes; "text" is `validation_view`."""
