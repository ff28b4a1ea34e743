"""Work items on an existing Dask cluster whose workers see source and output under the same paths.

Each worker reads and decides the checkpoint once, checks that it comes to the same plan, and writes its items at their
planned offsets. What a lost worker was at is done again elsewhere, by the scheduler: the bytes are the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from nvfp4prep.convert import Prepared, decide, identified
from nvfp4prep.errors import EnvironmentFault, Stop, UsageFault
from nvfp4prep.execute import Elsewhere, reported
from nvfp4prep.journal import Outcome
from nvfp4prep.options import Options
from nvfp4prep.plan import Plan
from nvfp4prep.writer import PartialOutput

CONNECT_SECONDS = 30
WORKERS_SECONDS = 300
"""Without any worker, after which nobody waits any longer."""
_POLL_SECONDS = 1.0
_ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx|ucxx)://([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
BATCHES_PER_THREAD = 16
"""So many batches, for each of the cluster's threads, are small enough to spread evenly and to lose."""
_RETRIES = 5


def on_dask(
    scheduler: str, src: str, options: Sequence[Options], folders: Sequence[str], out: Path
) -> Callable[[str], Elsewhere]:
    """What `convert.write_all` takes as `elsewhere`.

    Args:
        scheduler: address, tcp://host:port.
        src: the checkpoint; a path is absolute, and one that workers see too.
        options, folders: of each target, as given to `decide`.
        out: OUT, on storage that workers share.

    Raises:
        UsageFault: `scheduler` is no address.
        EnvironmentFault: Dask is not installed.
    """
    if _ADDRESS.fullmatch(scheduler) is None:
        raise UsageFault(f"--scheduler {scheduler!r}: an address like tcp://host:8786 was expected")
    try:
        from distributed import Client
    except ImportError:
        raise EnvironmentFault(
            "--executor dask needs Dask: pip install 'nvfp4prep[distributed]' (in a clone: '.[distributed]')"
        ) from None

    def elsewhere(identity: str) -> Elsewhere:
        def run(todo: Sequence[int]) -> Iterator[tuple[int, Outcome]]:
            try:
                client: Any = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)  # type: ignore[no-untyped-call]
            except (OSError, TimeoutError, ValueError) as error:
                raise EnvironmentFault(f"--scheduler {scheduler}: no Dask scheduler answers ({error})") from None
            with client:
                yield from _gathered(client, todo, (src, tuple(options), tuple(folders), str(out.absolute()), identity))

        return run

    return elsewhere


def _gathered(client: Any, todo: Sequence[int], of: tuple[object, ...]) -> Iterator[tuple[int, Outcome]]:
    threads = max(1, sum(client.nthreads().values()))
    size = max(1, len(todo) // (threads * BATCHES_PER_THREAD))
    executor = client.get_executor(pure=False, retries=_RETRIES)
    batches = [tuple(todo[at : at + size]) for at in range(0, len(todo), size)]
    futures = [executor.submit(run_batch, *of, batch) for batch in batches]
    left, seen = set(futures), time.monotonic()
    try:
        while left:
            done, left = wait(left, _POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                yield from _result(future)
            if done or client.nthreads():
                seen = time.monotonic()
            elif time.monotonic() - seen > WORKERS_SECONDS:
                raise EnvironmentFault(
                    f"the Dask cluster has had no worker for {WORKERS_SECONDS} seconds; start one (dask worker), then "
                    "the same command goes on"
                )
    finally:
        executor.shutdown(wait=False)


def _result(future: Future[list[tuple[int, Outcome]]]) -> list[tuple[int, Outcome]]:
    try:
        return future.result()
    except Stop:
        raise
    except CancelledError:
        raise EnvironmentFault("the Dask scheduler was lost; start one, then the same command goes on") from None
    except Exception as failure:
        raise EnvironmentFault(f"a Dask worker failed: {type(failure).__name__}: {failure}") from failure


def run_batch(
    src: str, options: tuple[Options, ...], folders: tuple[str, ...], out: str, identity: str, numbers: tuple[int, ...]
) -> list[tuple[int, Outcome]]:
    """Run items of a plan, on a worker; they are on disk when it returns.

    Raises:
        EnvironmentFault: I/O, or the worker comes to another plan.
        InputRefused: as `decide`.
    """
    targets, plan, own = _decided(src, options, folders)
    if own != identity:
        raise EnvironmentFault(
            f"{src}: a worker comes to another plan than the process that started the run: the checkpoint, or the "
            "version of nvfp4prep, is not the same there"
        )
    jobs = [prepared.job for prepared in targets]
    with PartialOutput(Path(out), identity).joined() as output:
        with reported(targets[0].checkpoint.source, plan, jobs, output, 1, lambda count: None, numbers) as reports:
            done = list(reports)
        output.sync_written()
    return done


_deciding = Lock()


def _decided(
    src: str, options: tuple[Options, ...], folders: tuple[str, ...]
) -> tuple[tuple[Prepared, ...], Plan, str]:
    """Decided once for all threads of a worker."""
    with _deciding:
        return _decide_once(src, options, folders)


@lru_cache(maxsize=1)
def _decide_once(
    src: str, options: tuple[Options, ...], folders: tuple[str, ...]
) -> tuple[tuple[Prepared, ...], Plan, str]:
    from nvfp4prep.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(src)
    pairs = enumerate(zip(options, folders, strict=True))
    targets = tuple(decide(checkpoint, one, folder, number) for number, (one, folder) in pairs)
    return targets, *identified(targets)
