"""What of a run is on disk already, one JSON line for each finished item: a run that was killed goes on from there.

The lines stand in the marker beside OUT.partial (`writer`), after the id of the plan that they belong to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nvfp4prep import __version__
from nvfp4prep.plan import Plan
from nvfp4prep.scales import RescaleCounts
from nvfp4prep.source import Source


@dataclass
class Outcome:
    """What the workers report, of one item or of all.

    `digests` by (output key, piece number); `rescaled` by (job, block-scale tensor or MoE path); `folded` is the same
    of factors multiplied into rows of block scales, by (job, MoE path or linear); `flushed` counts block scales that a
    layout could not keep, by (job, MoE path); `unusable` counts such values of the source, by (rule, tensor, byte from
    which on they were read); `rounding` is the largest relative error of values written in fewer bits, by (job, what
    they are); `written` are bytes.
    """

    digests: dict[tuple[str, int], bytes] = field(default_factory=dict)
    unusable: dict[tuple[str, str, int], int] = field(default_factory=dict)
    rounding: dict[tuple[int, str], float] = field(default_factory=dict)
    rescaled: dict[tuple[int, str], RescaleCounts] = field(default_factory=dict)
    folded: dict[tuple[int, str], RescaleCounts] = field(default_factory=dict)
    flushed: dict[tuple[int, str], int] = field(default_factory=dict)
    written: int = 0

    def add(self, other: Outcome) -> None:
        """Take in what another item reported."""
        self.digests |= other.digests
        self.unusable |= other.unusable
        for of, error in other.rounding.items():
            self.rounding[of] = max(self.rounding.get(of, 0.0), error)
        for mine, others in ((self.rescaled, other.rescaled), (self.folded, other.folded)):
            for key, counts in others.items():
                mine[key] = mine.get(key, RescaleCounts()) + counts
        for key, count in other.flushed.items():
            self.flushed[key] = self.flushed.get(key, 0) + count
        self.written += other.written

    def rescaled_by(self, job: int) -> dict[str, RescaleCounts]:
        """What rescaling did for one job."""
        return {name: counts for (number, name), counts in self.rescaled.items() if number == job}

    def folded_by(self, job: int) -> dict[str, RescaleCounts]:
        """What factors of rows did to block scales for one job."""
        return {name: counts for (number, name), counts in self.folded.items() if number == job}

    def rounding_by(self, job: int) -> dict[str, float]:
        """The largest relative error of one job's rounded values, by what they are."""
        return {kind: error for (number, kind), error in sorted(self.rounding.items()) if number == job}

    def unusable_by_tensor(self) -> dict[str, dict[str, int]]:
        """Unusable values by rule, then by tensor."""
        counts: dict[str, dict[str, int]] = {}
        for (rule, name, _), count in self.unusable.items():
            of_rule = counts.setdefault(rule, {})
            of_rule[name] = of_rule.get(name, 0) + count
        return counts

    def flushed_by(self, job: int) -> dict[str, int]:
        """Block scales that one job's layout could not keep, by MoE path."""
        return {path: count for (number, path), count in self.flushed.items() if number == job}


def plan_id(source: Source, plan: Plan, decided: Iterable[object]) -> str:
    """What two runs must share for one to go on with what the other wrote: 32 hex digits.

    Args:
        source: whose files are known by size, time and inode; those of a Hub repo by commit.
        plan: where every byte goes.
        decided: whatever else their values depend on: options, resolved scales; by their repr.
    """
    whole = hashlib.sha256(__version__.encode())
    for part in source.identity():
        whole.update(f"\0{part}".encode("utf-8", "surrogateescape"))
    for shard in plan.shards:
        whole.update(f"\0{shard.file}\0{shard.nbytes}\0".encode())
        whole.update(shard.header)
    for item in plan.items:
        whole.update(f"\0{item.label}\0{len(item.steps)}".encode())
    for value in decided:
        whole.update(repr(value).encode("utf-8", "backslashreplace"))
    return whole.hexdigest()[:32]


def line(number: int, outcome: Outcome, positions: Mapping[str, int]) -> bytes:
    """The line of a finished item.

    Args:
        number: of the item in its plan.
        outcome: what it reported.
        positions: of each output key in the plan.
    """
    entry: dict[str, Any] = {
        "item": number,
        "bytes": outcome.written,
        "digests": [[positions[key], piece, digest.hex()] for (key, piece), digest in outcome.digests.items()],
    }
    if outcome.unusable:
        entry["unusable"] = [[*key, count] for key, count in outcome.unusable.items()]
    if outcome.rounding:
        entry["rounding"] = [[job, kind, error] for (job, kind), error in outcome.rounding.items()]
    if outcome.rescaled:
        entry["rescaled"] = [[job, name, asdict(counts)] for (job, name), counts in outcome.rescaled.items()]
    if outcome.folded:
        entry["folded"] = [[job, name, asdict(counts)] for (job, name), counts in outcome.folded.items()]
    if outcome.flushed:
        entry["flushed"] = [[job, path, count] for (job, path), count in outcome.flushed.items()]
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def finished(lines: Sequence[bytes], plan: Plan) -> dict[int, Outcome]:
    """What each finished item reported, by number. A line that can't be read ends the journal: it was cut off."""
    keys = list(plan.outputs)
    found: dict[int, Outcome] = {}
    for raw in lines:
        try:
            number, outcome = _parse(json.loads(raw), keys)
        except (ValueError, KeyError, TypeError, IndexError):
            break
        if not 0 <= number < len(plan.items):
            break
        found[number] = outcome
    return found


def _parse(entry: Mapping[str, Any], keys: Sequence[str]) -> tuple[int, Outcome]:
    return int(entry["item"]), Outcome(
        {(keys[key], piece): bytes.fromhex(digest) for key, piece, digest in entry["digests"]},
        {(rule, name, start): count for rule, name, start, count in entry.get("unusable", ())},
        {(job, kind): error for job, kind, error in entry.get("rounding", ())},
        {(job, name): RescaleCounts(**counts) for job, name, counts in entry.get("rescaled", ())},
        {(job, name): RescaleCounts(**counts) for job, name, counts in entry.get("folded", ())},
        {(job, path): count for job, path, count in entry.get("flushed", ())},
        int(entry["bytes"]),
    )
