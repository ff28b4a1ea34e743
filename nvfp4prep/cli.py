"""The command line: the only module that prints. Heavy imports wait for the command that needs them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from nvfp4prep import __version__
from nvfp4prep.errors import (
    EXIT_CHECK_FAILED,
    EXIT_ENVIRONMENT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    CheckFailed,
    EnvironmentFault,
    InputRefused,
    Stop,
    UsageFault,
)
from nvfp4prep.findings import printable

if TYPE_CHECKING:
    from nvfp4prep.convert import Prepared, Result
    from nvfp4prep.findings import Finding
    from nvfp4prep.schema import Schema
    from nvfp4prep.sharing import Share
    from nvfp4prep.validation import Report

_SHOWN_FINDINGS = 40
_PIPE_WIDTH = 140
_LINE_SECONDS = 5.0
_MOST_BYTES = 1 << 63
_CONVERT_TOKENS = (1, 64)
_SIZE_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


class _Main(click.Group):
    """Every way to end has its exit code and one message, as JSON too where --json is asked for."""

    _as_json = False

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("standalone_mode", True):
            return super().main(*args, **kwargs)
        asked = kwargs.get("args") or (args[0] if args else None) or sys.argv[1:]
        self._as_json = as_json = "--json" in asked
        _stdout.lost = None
        _open_standard_streams()
        with _stops(as_json):
            try:
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
            except click.ClickException as error:
                with suppress(OSError):
                    error.show()
                if as_json:
                    _print_json({"error": {"exit_code": error.exit_code, "message": error.format_message()}})
                sys.exit(error.exit_code)
            except click.Abort as abort:
                raise abort.__cause__ or KeyboardInterrupt from None
        sys.exit(code if isinstance(code, int) else EXIT_OK)

    def invoke(self, ctx: click.Context) -> Any:
        with _stops(self._as_json):  # before click sees an interrupt
            return super().invoke(ctx)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="nvfp4prep")
def main() -> None:
    """Turn a ModelOpt NVFP4 or int4 checkpoint into one that serving engines agree on.

    Exit codes: 0 done; 1 a check failed; 2 usage; 3 input refused, nothing written; 4 I/O or environment;
    130 interrupted.
    """


class _ByteSize(click.ParamType[int]):
    """5GB, 512MiB, 1000000: decimal and binary units."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", str(value).strip().upper())
        if match is None or match[2] not in _SIZE_UNITS:
            self.fail(f"{value!r} is no size; write 5GB or 512MiB", param, ctx)
        size = Decimal(match[1]) * _SIZE_UNITS[match[2]]
        if size < 1:
            self.fail("a shard needs at least one byte", param, ctx)
        if size > _MOST_BYTES:
            self.fail("no file is that large; write 5GB or 512MiB", param, ctx)
        return min(int(size), _MOST_BYTES // 2)  # the most that a manifest may hold


class _Layers(click.ParamType[Any]):
    """all, first-last, or layer numbers: 0,5."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("all", "first-last") or isinstance(value, tuple):
            return value
        return _numbers(self, value, 0, param, ctx)


class _Counts(click.ParamType[tuple[int, ...]]):
    """Token counts: 1,7,64."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else _numbers(self, value, 1, param, ctx)


class _Rules(click.ParamType[frozenset[str]]):
    """Rules: ids, beginnings of ids, names; commas between them."""

    name = "rules"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> frozenset[str]:
        from nvfp4prep.rules import picked

        if isinstance(value, frozenset):
            return value
        try:
            return picked(word.strip() for word in value.split(","))
        except ValueError as error:
            self.fail(f"no rule is called {str(error)!r}; nvfp4prep rules lists them", param, ctx)


def _numbers(
    kind: click.ParamType[Any], value: Any, least: int, param: click.Parameter | None, ctx: click.Context | None
) -> tuple[int, ...]:
    parts = str(value).split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 and int(part) >= least for part in parts):
        kind.fail(f"{value!r}: numbers from {least} on, with commas between them", param, ctx)
    return tuple(dict.fromkeys(int(part) for part in parts))


class _ShareOf(click.ParamType[Any]):
    """I/N, counted from 1."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from nvfp4prep.sharing import Share

        index, _, count = str(value).partition("/")
        if not all(part.isdecimal() and len(part) < 6 for part in (index, count)) or not 1 <= int(index) <= int(count):
            self.fail(f"{value!r}: I/N, share I of N, with I from 1 to N", param, ctx)
        return Share(int(index), int(count))


_LAYOUTS = (
    "flashinfer-trtllm",
    "flashinfer-cutlass",
    "flashinfer-cutedsl",
    "vllm-cutlass",
    "vllm-marlin",
    "vllm-marlin-int4",
    "moe-wna16",
    "flashinfer-sm90-w4a8",
    "sglang-w4afp8",
    "flashinfer-mxint4",
)
_OF_PACKED = ("engine", "tp", "ep", "activation_dtype")
"""Options that say how experts are packed."""
_ENGINES = ("vllm", "sglang", "flashinfer")
_TARGETS = ("hf", "compressed-tensors", *_LAYOUTS, "auto")
_BACKENDS = (
    "auto",
    "flashinfer-trtllm",
    "flashinfer-cutlass",
    "flashinfer-cutedsl",
    "flashinfer-sm90-w4a8",
    "marlin",
    "emulator",
)
_GPUS = ("b200", "b300", "rtx50", "h200", "h100", "a100")

_json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout, and nothing else there."
)

_engine_option = click.option(
    "--engine",
    type=click.Choice(_ENGINES),
    help="Packed targets: whose padding and parameter names.  [default: the first that has the kernel]",
)
_tp_option = click.option(
    "--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Packed targets: tensor-parallel ranks."
)
_ep_option = click.option(
    "--ep", type=click.IntRange(1, 1024), default=1, show_default=True, help="Packed targets: expert-parallel ranks."
)
_gpu_option = click.option("--gpu", type=click.Choice(_GPUS), help="For --target auto.  [default: the one present]")
_impute_option = click.option(
    "--impute",
    type=click.Choice(["none", "layer-max", "ones"]),
    default="none",
    show_default=True,
    help="Missing or unusable input_scale: refuse, or take the layer's maximum. ones: that, and ones for a "
    "pre_quant_scale that only some experts have.",
)
_pre_quant_scale_option = click.option(
    "--pre-quant-scale",
    type=click.Choice(["refuse", "fold"]),
    default="refuse",
    show_default=True,
    help="AWQ's factors where a target has no place for them: refuse, or fold them into norms and scales.",
)

_private_option = click.option("--private", is_flag=True, help="A Hub repo that is made now is private.")

_output_options = [
    click.option("--workers", type=click.IntRange(1, 256), help="Threads.  [default: the CPUs, at most 8]"),
    click.option(
        "--overwrite", is_flag=True, help="Replace an existing checkpoint at OUT, once the new one is complete."
    ),
    _json_option,
    click.option("-q", "--quiet", is_flag=True, help="Errors only."),
]


def _with_output_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_output_options):
        command = option(command)
    return command


@main.command(short_help="Make a checkpoint that engines agree on, or pack it for a kernel.")
@click.argument("src")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Choice(_TARGETS),
    help="What to write; repeated: OUT/TARGET each.  [default: hf]",
)
@_engine_option
@_tp_option
@_ep_option
@click.option(
    "--activation-dtype",
    type=click.Choice(["bf16", "fp16"]),
    default="bf16",
    show_default=True,
    help="Packed targets: what the engine computes in (Marlin's scales depend on it).",
)
@_gpu_option
@click.option(
    "--input-scale",
    type=click.Choice(["layer-max", "keep"]),
    default="layer-max",
    show_default=True,
    help="One input_scale per MoE layer and GEMM, or as stored.",
)
@click.option(
    "--w13-scale",
    type=click.Choice(["auto", "split", "unify"]),
    default="auto",
    show_default=True,
    help="Gate/up weight_scale_2: one shared value with rescaled block scales, or two.",
)
@_impute_option
@_pre_quant_scale_option
@click.option(
    "--max-shard-size", type=_ByteSize(), help="Largest output file.  [default: 5GB, or as in SRC's manifest]"
)
@click.option(
    "--smoke-layers",
    type=_Layers(),
    default="first-last",
    show_default=True,
    help="MoE layers that the smoke check runs before OUT appears: all, first-last, or numbers like 0,5.",
)
@click.option("--no-smoke", is_flag=True, help="Leave the smoke check out.")
@click.option(
    "--keep-source",
    is_flag=True,
    help="Hub repos: download all of SRC to huggingface_hub's cache, and keep it there.",
)
@click.option(
    "--shard",
    "share",
    type=_ShareOf(),
    metavar="I/N",
    help="Write only share I of N, for N processes on shared storage.",
)
@click.option("--executor", type=click.Choice(["local", "dask"]), default="local", show_default=True, help="Who works.")
@click.option("--scheduler", metavar="ADDRESS", help="Of the Dask cluster: tcp://host:port.")
@click.option(
    "--push-to", metavar="ORG/NAME[@BRANCH]", help="Upload OUT to the Hub once it is complete, with a model card."
)
@_private_option
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Every finding, and each layer's scales.")
@_with_output_options
def convert(
    src: str,
    out: Path,
    targets: tuple[str, ...],
    gpu: str | None,
    max_shard_size: int | None,
    smoke_layers: Any,
    no_smoke: bool,
    keep_source: bool,
    workers: int | None,
    dry_run: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    share: Share | None,
    executor: str,
    scheduler: str | None,
    push_to: str | None,
    private: bool,
    **choices: Any,
) -> None:
    """Convert SRC, a directory or Hub repo (org/name[@revision]), to OUT, a new directory.

    Of a Hub repo each shard is fetched once, converted and given up; a few lie on OUT's disk at a time.
    """
    if quiet and verbose:
        raise click.UsageError("-q and -v exclude each other")
    if (executor == "dask") != (scheduler is not None):
        raise click.UsageError("--executor dask and --scheduler belong together")
    if share is not None and executor == "dask":
        raise click.UsageError("--shard and --executor dask exclude each other")
    if share is not None and push_to is not None:
        raise click.UsageError("--shard writes a part only; after nvfp4prep finish, upload with nvfp4prep push")
    if private and push_to is None:
        raise click.UsageError("--private is for --push-to")
    with _stops(as_json) as ending:
        from nvfp4prep import convert as conversion
        from nvfp4prep import writer
        from nvfp4prep.checkpoint import peek_checkpoint, read_checkpoint
        from nvfp4prep.options import Options

        threads = workers or conversion.default_workers()
        _check_used(targets, gpu)
        try:
            writer.check_destination(out, Path(src).expanduser(), overwrite=overwrite)
        except UsageFault as fault:
            if not dry_run:
                raise
            _tell(f"a real run would stop here: {fault}")
        if push_to is not None:
            _check_push(push_to, dry_run)
        whole = (keep_source or scheduler is not None) and not dry_run
        workspace = None if dry_run else writer.destination(out).parent
        checkpoint = read_checkpoint(src) if whole else peek_checkpoint(src, workspace)
        revision = checkpoint.source.revision  # others read the same commit, or the same path from where they are
        pinned = f"{checkpoint.source.spec}@{revision}" if revision else str(Path(src).expanduser().absolute())
        names = _resolve_targets(targets, gpu, checkpoint.schema)
        prepared = []
        for number, name in enumerate(names):
            mine = {key: value for key, value in choices.items() if name in _LAYOUTS or key not in _OF_PACKED}
            options = Options(name, max_shard_bytes=max_shard_size, **mine)
            folder = name if len(names) > 1 else ""
            prepared.append(conversion.decide(checkpoint, options, folder, number, threads))
            if not (no_smoke or share):  # `finish` checks what shares wrote
                _check_smoke_layers(prepared[-1], smoke_layers)
            if not (as_json or quiet):
                _print_plan(prepared[-1], verbose)
        shown = _plans_json(prepared) if as_json else {}
        if dry_run:
            if as_json:
                _print_json({"dry_run": True, **shown})
            elif not quiet:
                _print_dry_run(prepared, push_to)
            return
        total = sum(one.plan.nbytes_of_tensors for one in prepared)
        if share is not None:
            from nvfp4prep.sharing import SharedJob

            job = SharedJob(pinned, tuple(one.options for one in prepared), share.count, overwrite)
            with _progress(total // share.count, bar=not as_json, enabled=not quiet) as advance:
                conversion.write_share(
                    prepared, out, share, job, overwrite=overwrite, workers=threads, progress=advance
                )
                ending.on_disk = f"share {share} of {out} is written"
            if as_json:
                _print_json({"dry_run": False, "out": str(out), "share": str(share), **shown})
            elif not quiet:
                _say(f"Share {share} is written; once all are: nvfp4prep finish {out}\n")
            return
        elsewhere = None
        if scheduler is not None:
            from nvfp4prep.cluster import on_dask

            options_of, folders = [one.options for one in prepared], [one.folder for one in prepared]
            elsewhere = on_dask(scheduler, pinned, options_of, folders, out)
        _write(
            prepared,
            out,
            overwrite=overwrite,
            threads=threads,
            layers=None if no_smoke else smoke_layers,
            as_json=as_json,
            quiet=quiet,
            ending=ending,
            elsewhere=elsewhere,
            after=None if push_to is None else lambda: _push(out, push_to, private=private, quiet=quiet or as_json),
        )


def _check_push(spec: str, dry_run: bool) -> None:
    """Stop before the work where the upload after it can't succeed; a dry run tells so."""
    from nvfp4prep import push

    repo = push.destination(spec)
    try:
        push.check_may_push(repo)
    except EnvironmentFault as fault:
        if not dry_run:
            raise
        _tell(f"a real run would stop here: {fault}")


def _push(out: Path, spec: str, *, private: bool, quiet: bool) -> dict[str, str]:
    """Upload an output, and say where it is."""
    from dataclasses import asdict

    from nvfp4prep import push

    pushed = push.push(out, push.destination(spec), private=private, quiet=quiet)
    if not quiet:
        _say(f"Pushed: {pushed.url} ({pushed.commit})\n")
    return asdict(pushed)


def _write(
    prepared: Sequence[Prepared],
    out: Path,
    *,
    overwrite: bool,
    threads: int,
    layers: Any,
    as_json: bool,
    quiet: bool,
    ending: _Ending,
    shares: int | None = None,
    elsewhere: Any = None,
    after: Callable[[], dict[str, str]] | None = None,
) -> None:
    """Write decided targets to OUT with progress, and tell the result; `layers` are the smoke check's, or None.

    `after` does what is to be done with OUT once it is complete.
    """
    from nvfp4prep import convert as conversion

    reports: list[dict[str, Any]] = []
    check = conversion.no_check if layers is None else _smoke_hook(layers, reports, shown=not (as_json or quiet))
    total = sum(one.plan.nbytes_of_tensors for one in prepared)
    with _progress(total, bar=not as_json, enabled=not quiet) as advance:
        result = conversion.write_all(
            prepared,
            out,
            overwrite=overwrite,
            workers=threads,
            progress=advance,
            check=check,
            shares=shares,
            elsewhere=elsewhere,
        )
        ending.on_disk = f"{out} is complete"
    if not (as_json or quiet):
        _print_result(prepared, result)
    pushed = {} if after is None else {"pushed": after()}
    if as_json:
        last = {"manifest": result.manifest} if len(prepared) == 1 else {"manifests": list(result.manifests)}
        _print_json({"dry_run": False, "out": str(out), **_plans_json(prepared), **last, "smoke": reports, **pushed})


def _plans_json(prepared: Sequence[Prepared]) -> dict[str, Any]:
    plans = [_plan_json(one) for one in prepared]
    return plans[0] if len(plans) == 1 else {"targets": plans}


@main.command(short_help="Complete a conversion that was written by shares.")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--smoke-layers", type=_Layers(), default="first-last", show_default=True, help="As in convert.")
@click.option("--no-smoke", is_flag=True, help="Leave the smoke check out.")
@click.option("--workers", type=click.IntRange(1, 256), help="Threads.  [default: the CPUs, at most 8]")
@_json_option
@click.option("-q", "--quiet", is_flag=True, help="Errors only.")
def finish(out: Path, smoke_layers: Any, no_smoke: bool, workers: int | None, as_json: bool, quiet: bool) -> None:
    """Give OUT its name, once every share of it (convert --shard i/n) is written."""
    with _stops(as_json) as ending:
        from nvfp4prep import convert as conversion
        from nvfp4prep import writer
        from nvfp4prep.checkpoint import peek_checkpoint
        from nvfp4prep.sharing import read_job

        job = read_job(out)
        threads = workers or conversion.default_workers()
        checkpoint = peek_checkpoint(job.source, writer.destination(out).parent)
        prepared = [
            conversion.decide(checkpoint, options, options.target if len(job.targets) > 1 else "", number, threads)
            for number, options in enumerate(job.targets)
        ]
        for one in () if no_smoke else prepared:
            _check_smoke_layers(one, smoke_layers)
        _write(
            prepared,
            out,
            overwrite=job.overwrite,
            threads=threads,
            layers=None if no_smoke else smoke_layers,
            as_json=as_json,
            quiet=quiet,
            ending=ending,
            shares=job.shares,
        )


@main.command(short_help="Upload an output of convert to the Hub.")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("repo", metavar="ORG/NAME[@BRANCH]")
@_private_option
@_json_option
@click.option("-q", "--quiet", is_flag=True, help="Errors only.")
def push(out: Path, repo: str, private: bool, as_json: bool, quiet: bool) -> None:
    """Upload OUT, an output of convert, to a Hub repo, with a model card that says what was done.

    A repo or branch that is not there is made. Files that it has already are not sent again.
    """
    with _stops(as_json) as ending:
        ending.on_disk = f"{out} is as it was"
        pushed = _push(out, repo, private=private, quiet=quiet or as_json)
        if as_json:
            _print_json({"out": str(out), "pushed": pushed})


def _check_used(targets: Sequence[str], gpu: str | None) -> None:
    """Refuse options that are for targets that nobody asks for."""
    if gpu is not None and "auto" not in targets:
        raise click.UsageError("--gpu is for --target auto")
    if any(name in _LAYOUTS or name == "auto" for name in targets):
        return
    context = click.get_current_context()
    for name in _OF_PACKED:
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"{option} is for packed targets, such as {_LAYOUTS[0]}; asked for: {', '.join(targets) or 'hf'}"
            )


def _resolve_targets(targets: tuple[str, ...], gpu: str | None, schema: Schema | None) -> list[str]:
    """The targets asked for, without repeats, `auto` resolved for what `schema` holds."""
    names = []
    for name in targets or ("hf",):
        if name == "auto" and schema is not None:
            from nvfp4prep.targets import GPU_CAPABILITIES, present_capability, target_for

            capability = present_capability() if gpu is None else GPU_CAPABILITIES[gpu]
            name = target_for(capability, schema)
            why = "int4 experts" if name == "compressed-tensors" else capability or "no GPU here"
            _tell(f"--target auto: {name} ({why})")
        names.append(name)
    return list(dict.fromkeys(names))


@main.command(short_help="Get the hf checkpoint back from a packed one.")
@click.argument("packed", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@_with_output_options
def unpack(packed: Path, out: Path, workers: int | None, overwrite: bool, as_json: bool, quiet: bool) -> None:
    """Write the hf checkpoint that PACKED, a packed output of convert, was made from."""
    with _stops(as_json) as ending:
        from nvfp4prep import unpack as unpacking
        from nvfp4prep.convert import default_workers

        found = unpacking.prepare(packed, out, overwrite=overwrite)
        with _progress(found.plan.nbytes_of_tensors, bar=not as_json, enabled=not quiet) as advance:
            manifest = unpacking.write(
                found, out, overwrite=overwrite, workers=workers or default_workers(), progress=advance
            )
            ending.on_disk = f"{out} is complete"
        if as_json:
            _print_json({"out": str(out), "manifest": manifest})
        elif not quiet:
            _say(f"Done: {out}; unpacked from {found.packed.target.layout_id}.\n")


@main.command(short_help="Run a packed MoE layer on a real kernel or the emulator, against references.")
@click.argument("ckpt")
@click.option("--reference", help="The original BF16 checkpoint: directory or Hub repo.")
@click.option("--source", help="The ModelOpt checkpoint that a packed CKPT was made from.")
@click.option(
    "--target",
    type=click.Choice(_LAYOUTS),
    help="What a logical CKPT is packed for.  [default: flashinfer-trtllm, or the first that takes its experts]",
)
@click.option("--engine", type=click.Choice(_ENGINES), help="With --target.  [default: as in convert]")
@click.option("--backend", type=click.Choice(_BACKENDS), default="auto", show_default=True, help="What runs it.")
@click.option(
    "--layers", type=_Layers(), default="all", show_default=True, help="all, first-last, or numbers like 0,5."
)
@click.option("--tokens", type=_Counts(), default="1,7,64,1024", show_default=True, help="Token counts.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the hidden states.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Multiplies all tolerances (docs/smoke.md).",
)
@click.option("--self-test", is_flag=True, help="Break the packed layer on purpose, and show that the check notices.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the report as JSON; - is stdout.",
)
def smoke(
    ckpt: str,
    reference: str | None,
    source: str | None,
    target: str | None,
    engine: Any,
    backend: str,
    layers: Any,
    tokens: tuple[int, ...],
    seed: int,
    tolerance: float,
    self_test: bool,
    json_file: Path | None,
) -> None:
    """Check that CKPT, packed or to be packed in memory, computes the right thing: exit 0 passed, 1 failed."""
    to_stdout = json_file is not None and str(json_file) == "-"
    with _stops(to_stdout):
        from nvfp4prep.options import Options
        from nvfp4prep.smoke import view
        from nvfp4prep.smoke.check import Settings, check
        from nvfp4prep.smoke.run import subject_of

        options = None if target is None else Options(target, engine=engine)
        subject = subject_of(ckpt, options, reference, source)
        settings = Settings(backend, layers, tokens, seed, tolerance)
        found = check(subject, settings, lambda path: _tell(f"running {path}"))
        value = view.to_json(found)
        if not to_stdout:
            _print(view.report(found))
        passed = found.passed
        if self_test:
            from nvfp4prep.smoke import selftest

            results = selftest.self_test(subject, settings)
            value["self_test"] = view.self_test_json(results)
            passed = passed and all(result.status != "missed" for result in results)
            if not to_stdout:
                _print(view.self_test(results))
        if to_stdout:
            _print_json(value)
        elif json_file is not None:
            json_file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        if not passed:
            sys.exit(EXIT_CHECK_FAILED)


@main.command(short_help="Judge a checkpoint by every rule: for CI.")
@click.argument("src")
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Choice(_TARGETS),
    help="What it is to become; repeated.  [default: hf]",
)
@_engine_option
@_tp_option
@_ep_option
@_gpu_option
@_pre_quant_scale_option
@_impute_option
@click.option(
    "--level",
    type=click.Choice(["headers", "scales", "full"]),
    default="scales",
    show_default=True,
    help="What is read: headers and JSON; scalar scales too; every quantised byte, and digests of our own outputs.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "junit", "sarif", "github"]),
    default="text",
    show_default=True,
    help="How findings are written.",
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write them to a file.  [default: stdout]"
)
@click.option("--select", multiple=True, type=_Rules(), help="Only these rules: ids, beginnings of ids, names.")
@click.option("--ignore", multiple=True, type=_Rules(), help="Not these rules.")
@click.option(
    "--severity",
    type=click.Choice(["error", "warning", "info"]),
    default="info",
    show_default=True,
    help="The mildest that is shown.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning"]),
    default="error",
    show_default=True,
    help="The mildest with which the exit code is 1.",
)
@click.option(
    "--baseline",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An earlier run's --format json: its findings don't count.",
)
@click.option("--workers", type=click.IntRange(1, 256), help="Threads, at level full.  [default: the CPUs, at most 8]")
def validate(
    src: str,
    targets: tuple[str, ...],
    engine: Any,
    tp: int,
    ep: int,
    gpu: str | None,
    pre_quant_scale: Any,
    impute: Any,
    level: Any,
    form: str,
    output: Path | None,
    select: tuple[frozenset[str], ...],
    ignore: tuple[frozenset[str], ...],
    severity: Any,
    fail_on: Any,
    baseline: Path | None,
    workers: int | None,
) -> None:
    """Judge SRC, a directory or Hub repo, by every rule that the level reaches (nvfp4prep rules).

    An error is what convert refuses as it is asked; a warning what engines disagree about or read wrong as it stands,
    and convert repairs or says that it can't; an info worth knowing.

    Exit codes: 0 passed; 1 findings reach --fail-on; 2 usage; 3 SRC is no checkpoint; 4 I/O or environment.
    """
    with _stops(form == "json" and output is None):
        from nvfp4prep import validation
        from nvfp4prep.checkpoint import peek_checkpoint
        from nvfp4prep.convert import default_workers
        from nvfp4prep.options import Options
        from nvfp4prep.rules import BY_NAME

        _spare_source(output, src)
        known = validation.fingerprints(baseline) if baseline is not None else frozenset()
        chosen = frozenset[str]().union(*select) if select else frozenset(BY_NAME)
        _check_used(targets, gpu)
        schema = None
        if "auto" in targets:
            try:
                schema = peek_checkpoint(src).schema
            except InputRefused:  # for `validate` to tell
                targets = ("hf",)
        names = _resolve_targets(targets, gpu, schema)
        asked = [
            Options(name, impute=impute, engine=engine, tp=tp, ep=ep, pre_quant_scale=pre_quant_scale) for name in names
        ]
        threads = workers or default_workers()
        with _scanning(level == "full") as advance:
            found = validation.validate(src, level, asked, threads, advance)
        found = validation.selected(found, chosen.difference(*ignore), known)
        shown = validation.at_least(found, severity)
        _write_findings(shown, form, output)
        hidden = len(found.findings) - len(shown.findings)
        if hidden and form == "text":
            _tell(f"{hidden} milder finding{'s' if hidden > 1 else ''} not shown (--severity {severity})")
        if found.fails(fail_on):
            sys.exit(EXIT_CHECK_FAILED)


def _write_findings(found: Report, form: str, output: Path | None) -> None:
    """A report in a format, to stdout or to a file that appears whole."""
    if form == "text":
        from nvfp4prep import validation_view

        view = validation_view.report(found)
        if output is None:
            _print(view)
            return
        text = _plain_lines(view)
    else:
        from nvfp4prep.formats import FORMATS

        text = FORMATS[form](found)
    if output is None:
        _say(text if text.endswith("\n") else text + "\n")
    else:
        _replace_file(output, text)


def _replace_file(path: Path, text: str) -> None:
    """Write a file beside its name first, so that the name never holds a part of it; devices and pipes in place."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise EnvironmentFault(f"{path}: can't be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _spare_source(output: Path | None, src: str) -> None:
    """Refuse an output path that is a file of the checkpoint, or would become one. Raises UsageFault."""
    root = Path(src).expanduser()
    if output is None or not root.is_dir():
        return
    place, inside = output.resolve(), root.resolve()
    if place.is_relative_to(inside) and (place.exists() or place.suffix in (".safetensors", ".json")):
        raise UsageFault(f"{output}: lies in the checkpoint; write it elsewhere")
    if place.is_file() and any(place.samefile(path) for path in root.rglob("*") if path.is_file()):
        raise UsageFault(f"{output}: is a file of the checkpoint; write it elsewhere")


@main.command(short_help="Write one HTML page with findings and plots.")
@click.argument("src")
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The page: report.html."
)
@click.option("--workers", type=click.IntRange(1, 256), help="Threads.  [default: the CPUs, at most 8]")
def report(src: str, output: Path, workers: int | None) -> None:
    """Write one self-contained page about SRC: what it is, validate's findings at level full, plots of its scales."""
    with _stops(False) as ending:
        from nvfp4prep import validation
        from nvfp4prep.checkpoint import read_checkpoint
        from nvfp4prep.convert import default_workers
        from nvfp4prep.options import Options
        from nvfp4prep.report import data, page
        from nvfp4prep.report.histogram import block_scale_histogram, block_scales

        _spare_source(output, src)
        threads = workers or default_workers()
        checkpoint = read_checkpoint(src)
        with _scanning(True) as advance:
            found = validation.validated(src, checkpoint, "full", (Options(),), threads, advance)
        scales = block_scales(checkpoint.schema)
        histogram = block_scale_histogram(checkpoint.source, scales) if scales else None
        _replace_file(output, page.render(data.collect(checkpoint, found, histogram)))
        ending.on_disk = f"{output} is complete"
        _say(f"Done: {output}\n")


@main.command(short_help="List the rules, or explain one.")
@click.argument("rule", required=False)
@_json_option
def rules(rule: str | None, as_json: bool) -> None:
    """List the rules of validate, or some (NVP4), or explain one: its id (NVP401) or name."""
    with _stops(as_json):
        from nvfp4prep import rules_view
        from nvfp4prep.rules import BY_ID, BY_NAME, RULES

        if rule is None:
            if as_json:
                _print_json({"rules": [rules_view.to_json(one) for one in RULES]})
            else:
                _print(rules_view.table(RULES))
            return
        found = BY_ID.get(rule.upper()) or BY_NAME.get(rule)
        some = [one for one in RULES if one.id.startswith(rule.upper())]
        if found is None and some:
            if as_json:
                _print_json({"rules": [rules_view.to_json(one) for one in some]})
            else:
                _print(rules_view.table(some))
            return
        if found is None:
            raise UsageFault(f"no rule {rule}; nvfp4prep rules lists them")
        if as_json:
            _print_json(rules_view.to_json(found))
        else:
            _print(rules_view.detail(found))


@main.command(short_help="List the packed targets.")
@_json_option
def targets(as_json: bool) -> None:
    """List the packed targets: kernel, GPUs, engines, alignment, scalars, what they need."""
    with _stops(as_json):
        from nvfp4prep import render
        from nvfp4prep.targets import target_table

        rows = target_table()
        if as_json:
            _print_json({"targets": rows})
        else:
            _print(render.targets(rows))


@main.command(short_help="Show what a checkpoint holds and what engines do with it.")
@click.argument("src")
@_json_option
@click.option("--layer", type=click.IntRange(0), help="Only this layer, expert by expert.")
def inspect(src: str, as_json: bool, layer: int | None) -> None:
    """Show what SRC holds, what each engine would do with it, and what convert would change."""
    with _stops(as_json):
        from nvfp4prep import inspection

        found = inspection.inspect(src, layer)
        if as_json:
            _print_json(inspection.to_json(found))
        else:
            from nvfp4prep import inspection_view

            _print(inspection_view.inspection(found))


def _check_smoke_layers(prepared: Prepared, layers: Any) -> None:
    """Raise UsageFault for layers that the smoke check would not find, once everything is written."""
    from nvfp4prep.smoke.choice import chosen_layers

    if prepared.smoked:
        chosen_layers(prepared.smoked, layers)


def _smoke_hook(layers: Any, reports: list[dict[str, Any]], *, shown: bool) -> Callable[[Prepared, Path], None]:
    """For `write_all`: run the smoke check on finished shards; a failure keeps OUT from appearing."""

    def check(prepared: Prepared, root: Path) -> None:
        from nvfp4prep.smoke import run, view
        from nvfp4prep.smoke.check import Settings
        from nvfp4prep.smoke.check import check as run_check

        if not prepared.smoked:
            return
        try:
            subject = run.subject_of_output(prepared, root)
        except run.NotChecked as reason:
            reports.append({"target": prepared.options.target, "checked": False, "because": str(reason)})
            if shown:
                _say(f"smoke check not run: {reason}\n")
            return
        found = run_check(subject, Settings(layers=layers, tokens=_CONVERT_TOKENS))
        reports.append(view.to_json(found))
        if not found.passed:
            _print_to_stderr(view.report(found))
            raise CheckFailed(
                f"the smoke check failed; {root} holds the output without config or index, for looking into"
            )
        if shown:
            ran = found.backend if found.kernel_ran else f"emulator; kernel not run: {found.why_not}"
            _say(f"smoke check of {found.target}: {len(found.rows)} comparisons passed ({ran})\n")

    return check


# --- how a run ends ------------------------------------------------------------------------------------------------


class _Terminated(KeyboardInterrupt):
    """SIGTERM: ended as cleanly as SIGINT."""


@dataclass
class _Ending:
    """What the message that ends a command must know: what is on disk, the signal that came, what stdout lost."""

    on_disk: str = "nothing was left behind"
    signalled: type[KeyboardInterrupt] | None = None


@contextmanager
def _stops(as_json: bool) -> Iterator[_Ending]:
    """Turn every expected stop into a message on stderr (and JSON on stdout) and its exit code."""
    ending = _Ending()
    with _signals(ending):
        try:
            try:
                yield ending
            except Exception as error:  # a signal during an import or a callback may come out as anything
                if ending.signalled is None or isinstance(error, click.ClickException | click.exceptions.Exit):
                    raise
                raise ending.signalled from error
        except SystemExit:
            if _stdout.lost is not None:
                _end(EXIT_ENVIRONMENT, [f"stdout: {_stdout.lost}; {ending.on_disk}"], (), as_json)
            raise
        except Stop as stop:
            findings: tuple[Finding, ...] = stop.findings if isinstance(stop, InputRefused) else ()
            lines = [str(finding) for finding in findings] or [str(stop)]
            _end(stop.exit_code, [*lines, *_notes(stop)], findings, as_json)
        except KeyboardInterrupt as interrupt:
            code, what = EXIT_INTERRUPTED, "interrupted"
            if isinstance(interrupt, _Terminated):
                code, what = EXIT_TERMINATED, "terminated"
            _end(code, ["; ".join([what, *(_notes(interrupt) or [ending.on_disk])])], (), as_json)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            _end(EXIT_ENVIRONMENT, [f"{place}{error.strerror or error}", *_notes(error)], (), as_json)
        except MemoryError as error:
            _end(EXIT_ENVIRONMENT, ["out of memory; use fewer --workers", *_notes(error)], (), as_json)
        except ImportError as error:  # of a library, with too little memory or a broken installation
            _end(EXIT_ENVIRONMENT, [f"a library can't be loaded: {error}", *_notes(error)], (), as_json)
        if _stdout.lost is not None:
            _end(EXIT_ENVIRONMENT, [f"stdout: {_stdout.lost}; {ending.on_disk}"], (), as_json)


@contextmanager
def _signals(ending: _Ending) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise in the main thread, and are remembered; one that is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _: object) -> NoReturn:
        ending.signalled = KeyboardInterrupt if number == signal.SIGINT else _Terminated
        raise ending.signalled

    known = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in known if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _notes(error: BaseException) -> list[str]:
    """What `writer` noted on an exception, or on the one it came from, about what is on disk."""
    found: BaseException | None = error
    while found is not None:
        if notes := getattr(found, "__notes__", None):
            return [str(notes[-1])]
        found = found.__cause__ or found.__context__
    return []


def _end(code: int, lines: list[str], findings: tuple[Finding, ...], as_json: bool) -> NoReturn:
    for line in map(printable, lines[:_SHOWN_FINDINGS]):
        _tell(line if line.startswith("error") else f"error: {line}")
    if len(lines) > _SHOWN_FINDINGS:
        _tell(f"... and {len(lines) - _SHOWN_FINDINGS} more; --json lists all")
    if as_json:
        message = (
            {"findings": [finding.to_json() for finding in findings]} if findings else {"message": "\n".join(lines)}
        )
        _print_json({"error": {"exit_code": code, **message}})
    _say("")  # what click could not write must not fail again when the interpreter ends
    _stdout.lost = None  # told, or of no more interest
    sys.exit(code)


# --- what is printed -------------------------------------------------------------------------------------------------


@dataclass
class _Stdout:
    """Why stdout could not be written, for the end of the command: it must not stop the work."""

    lost: str | None = None


_stdout = _Stdout()


def _open_standard_streams() -> None:
    """Closed standard streams become /dev/null, so that no output file gets their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - the interpreter closes it


def _print_json(value: Any) -> None:
    _say(json.dumps(value, ensure_ascii=False) + "\n")


def _say(text: str) -> None:
    """Text on stdout. A reader that went away must not turn finished work into a failure; a full disk ends it late."""
    if sys.stdout is None:
        return
    try:
        click.echo(text, nl=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()
    except OSError as error:
        _stdout.lost = f"can't be written: {error.strerror or error}"
        _silence()


def _silence() -> None:
    """Send stdout to /dev/null, with what is still in its buffer."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)


def _tell(text: str) -> None:
    """A line on stderr, from any thread; where it can't be written there is nobody to tell."""
    with suppress(OSError):
        click.echo(text, err=True)


def _print(renderable: Any) -> None:
    """A rich renderable: in colour and in the terminal's width, or plain lines without padding."""
    from rich.console import Console

    if sys.stdout is not None and sys.stdout.isatty():
        Console(highlight=False).print(renderable)
    else:
        _say(_plain_lines(renderable))


def _plain_lines(renderable: Any) -> str:
    from rich.console import Console

    console = Console(highlight=False, width=_PIPE_WIDTH, file=io.StringIO(), soft_wrap=True)
    console.print(renderable, soft_wrap=True)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "".join(line.rstrip() + "\n" for line in lines)


def _print_to_stderr(renderable: Any) -> None:
    from rich.console import Console

    width = None if sys.stderr is not None and sys.stderr.isatty() else _PIPE_WIDTH
    with suppress(OSError):
        Console(stderr=True, highlight=False, width=width, soft_wrap=width is not None).print(renderable)


def _print_plan(prepared: Prepared, verbose: bool) -> None:
    from nvfp4prep import render

    _print(render.plan(prepared, verbose))


def _print_dry_run(prepared: Sequence[Prepared], push_to: str | None) -> None:
    from rich.console import Group

    from nvfp4prep import inspection_view, render
    from nvfp4prep.inspection import outlook_of

    for one in prepared:
        _print(Group(*render.shard_list(one)))
        if one.options.target == "hf":
            _print(Group(*inspection_view.left_after(outlook_of(one))))
    if push_to is not None:
        total = render.size(sum(one.bytes_needed for one in prepared))
        _say(f"OUT, {total}, would then be uploaded to {push_to} with a model card.\n")
    _say("Dry run: nothing was written.\n")


def _print_result(prepared: Sequence[Prepared], result: Result) -> None:
    from rich.console import Group

    from nvfp4prep import inspection_view, render
    from nvfp4prep.inspection import outlook_of

    for one in prepared:
        if one.options.target == "hf":
            _print(Group(*inspection_view.left_after(outlook_of(one))))
    _print(render.result(prepared, result))


def _plan_json(prepared: Prepared) -> dict[str, Any]:
    from nvfp4prep.inspection import plan_json

    return plan_json(prepared)


@contextmanager
def _progress(total: int, *, bar: bool, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A bar with bytes, rate and ETA on a terminal; a line every few seconds otherwise; silent when not enabled."""
    if enabled and bar and sys.stderr is not None and sys.stderr.isatty():
        with _bar(total) as advance:
            yield advance
    else:
        yield _lines(total) if enabled else lambda _: None


@contextmanager
def _scanning(enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal while bytes are read."""
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=None)

        def advance(count: int, total: int) -> None:
            progress.update(task, total=total, advance=count)

        yield advance


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("writing", total=total)
        yield lambda count: progress.advance(task, count)


def _lines(total: int) -> Callable[[int], None]:
    from threading import Lock
    from time import monotonic

    lock, begun = Lock(), monotonic()
    done, shown = 0, begun

    def advance(count: int) -> None:
        nonlocal done, shown
        with lock:
            done += count
            now = monotonic()
            if now - shown >= _LINE_SECONDS:
                shown = now
                rate = done / (now - begun)
                left = f"{rate / 1e6:,.0f} MB/s, {(total - done) / rate:,.0f} s left"
                _tell(f"written {done:,} of {total:,} bytes ({done / total:.0%}), {left}")

    return advance
