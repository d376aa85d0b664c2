"""`fleet-worker`: the agent as a process; `fleet-worker fetch`: only the model into the node's cache.

Exit codes: 0 clean stop, 1 engine died, 2 configuration or model problem.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable


def main() -> int:
    """Run one worker until it is told to stop; the last stderr line names the cause of a failure."""
    if sys.argv[1:] != ["fetch"]:  # that would be taken for a model that is there
        # what follows takes seconds, in which the first process of a container would not even hear it
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    from fleet_worker.agent.agent import Agent
    from fleet_worker.agent.alone import end_without_them
    from fleet_worker.agent.errors import WorkerError
    from fleet_worker.agent.follower import Follower
    from fleet_worker.agent.identity import read_identity
    from fleet_worker.agent.logpump import unheld
    from fleet_worker.transfer.transport import ucx_environment

    async def run() -> int:
        os.environ.update(ucx_environment("auto", False, os.environ))  # what the pod says, as NIXL takes it on this node
        config, identity = read_identity(os.environ)
        return await (Follower if identity.member > 0 else Agent)(config, identity).run()

    def ended(work: Callable[[], int]) -> int:
        try:
            return work()
        except WorkerError as error:
            sys.stdout.flush()
            print(f"{error.reason}: {error}", file=sys.stderr, flush=True)
            return error.exit_code

    if sys.argv[1:] == ["fetch"]:
        from fleet_worker.agent.fetching import fetch_model

        with unheld():
            return ended(fetch_model)
    with unheld():
        code = ended(lambda: asyncio.run(run()))
    return end_without_them(code)


if __name__ == "__main__":
    sys.exit(main())
