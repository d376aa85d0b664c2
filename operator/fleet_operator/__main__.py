"""`fleet-operator`: the operator as a process. Exit codes: 0 told to stop, 1 failed, 2 wrong arguments or credentials, 3 it lost
the lease and must begin anew."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet_operator.options import Options

YOUNG, MIDDLE, OLD = 10_000, 50, 50
"""Thresholds of the garbage collector: its usual 700 young objects are a few watch events."""
LOOK_UP_S = 1.0
"""For threads that were told to end: with all but a look-up of a name it takes no longer."""


def main() -> int:
    """Reconcile until told to stop."""
    # what follows takes seconds, in which the first process of a container would not even hear it
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from fleet_operator.options import parse_options

    options = parse_options(sys.argv[1:])
    from fleet_operator.health.logs import set_up_logs

    set_up_logs(options.log_format)
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    return end_without_lookups(_run(options))


def _run(options: Options) -> int:
    import uvloop

    from fleet_operator.cluster.interface import CRDS, ClusterError, NotFoundError
    from fleet_operator.leader.elector import LeadershipLostError
    from fleet_operator.process import run

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # TLS in C: a tenth off each request
            runner.run(run(options))
    except ClusterError as error:
        then = f"; {CRDS}" if isinstance(error, NotFoundError) else ""
        print(f"{error.reason}: {error}{then}", file=sys.stderr, flush=True)
        return 2
    except LeadershipLostError as error:
        print(f"LeadershipLost: {error}", file=sys.stderr, flush=True)
        return 3
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def end_without_lookups(code: int) -> int:
    """The exit code. Where a look-up of a name hangs the process ends here: the interpreter waits for the threads of a pool, and
    the resolver gives up after a minute. Of one replica nobody would reconcile meanwhile."""
    from fleet_operator.telemetry.prometheus import THREADS_NAME

    looking = [thread for thread in threading.enumerate() if thread.name.startswith(THREADS_NAME)]
    until = time.monotonic() + LOOK_UP_S
    for thread in looking:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in looking):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
