"""The ways a run stops, each with its exit code. `cli` turns them into messages; nothing else prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from nvfp4prep.findings import Finding

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_ENVIRONMENT = 4
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_MOST_FINDINGS = 10_000


class Stop(Exception):
    """Base of every expected stop: a message a person can act on, and an exit code."""

    exit_code: ClassVar[int]


class Stopped(Exception):
    """A worker saw that another one failed, or that the user interrupted; never leaves the pool."""


class CheckFailed(Stop):
    """A check on an output failed."""

    exit_code = EXIT_CHECK_FAILED


class UsageFault(Stop):
    """The command line asks for something that makes no sense."""

    exit_code = EXIT_USAGE


class InputRefused(Stop):
    """The input can't be converted as asked; nothing was written. Carries the findings that refuse it, if not too many.

    A checkpoint of a million tensors, each of them wrong, is told by the first 10,000.
    """

    exit_code = EXIT_REFUSED

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings[:_MOST_FINDINGS])
        super().__init__("\n".join(str(finding) for finding in self.findings))

    def __reduce__(self) -> tuple[type[InputRefused], tuple[tuple[Finding, ...]]]:
        return InputRefused, (self.findings,)  # from another process it comes with its findings


class EnvironmentFault(Stop):
    """I/O, disk, network or permissions: the input may be fine."""

    exit_code = EXIT_ENVIRONMENT
