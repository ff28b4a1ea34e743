"""Rules as functions: each looks at a checkpoint for one thing and yields `Finding`s.

What can't be read past is found where it is read instead: files in `source`, modules in `schema`, configurations in
`quant_config`, unusable scales in `scales`, what a target asks in `targets`. To add a rule, give it an entry in
`rules` and a function here, in one of the tuples below.

`HEADERS` need headers and JSON files, `SCALES` also the values of scalar scales. What stands in a `..._REPAIRED` tuple
is about how the checkpoint is stored, which `convert` puts right by default. `blocks` reads every quantised byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.checks import awq, experts, files, fp8, kv_cache, model, scales
from nvfp4prep.findings import Finding

Check = Callable[[Checkpoint], Iterable[Finding]]

HEADERS: tuple[Check, ...] = (
    files.stray,
    files.changed_output,
    model.layers,
    model.missing_head,
    model.differing_sizes,
    experts.unquantized,
    experts.shared_unquantized,
    experts.uneven,
    experts.router_shape,
    experts.router_bias,
    awq.missing,
    awq.folded_shared_expert,
    awq.shapes,
    fp8.missing,
    kv_cache.unpaired,
    kv_cache.missing,
)
HEADERS_REPAIRED: tuple[Check, ...] = (scales.stored_in_16_bits, scales.fused_vectors)
SCALES: tuple[Check, ...] = (scales.reciprocals, scales.outliers, fp8.values, kv_cache.values)
SCALES_REPAIRED: tuple[Check, ...] = (scales.differing_inputs, scales.differing_halves, scales.differing_linears)


def found(checks: Iterable[Check], checkpoint: Checkpoint) -> list[Finding]:
    """What some checks find. Raises EnvironmentFault when something can't be read."""
    return [finding for check in checks for finding in check(checkpoint)]
