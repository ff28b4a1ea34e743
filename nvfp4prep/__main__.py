"""The process: ``python -m nvfp4prep``, and what the ``nvfp4prep`` command may call."""

import gc
import os
import signal

_GC_OBJECTS = 100_000
"""New objects between two looks for garbage: a plan is millions of them, and all live to its end."""


def _end(code: int, message: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(2, f"error: {message}; nothing was left behind\n".encode())
    raise SystemExit(code)


def run() -> None:
    """`cli.main`, with signals that come before it or after it told in one line too."""
    gc.set_threshold(_GC_OBJECTS)
    try:
        signal.signal(signal.SIGTERM, lambda *_: _end(143, "terminated"))
        from nvfp4prep.cli import main
    except KeyboardInterrupt:
        _end(130, "interrupted")
    try:
        main()
    finally:  # what remains is the interpreter's own end
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    run()
