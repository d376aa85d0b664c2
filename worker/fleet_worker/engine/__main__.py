"""`python -m fleet_worker.engine`: the torch engine as a process, started by the agent.

Reads FLEET_WORKER_CONFIG, FLEET_MODEL_PATH and FLEET_POD_IP. Exit codes: 0 told to stop, 2 the model, the configuration or
the address cannot be used (last stderr line names the cause), 1 the engine failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from fleet_worker.config import CONFIG_ENV, POD_IP_ENV, WorkerConfig, decode


def main() -> int:
    """Serve until told to end (assemble.EngineProcess)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the model is loaded it ends us without a traceback
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    config = decode(os.environ[CONFIG_ENV])
    apply_ucx(config)
    from fleet_worker.engine.errors import ModelFilesError
    from fleet_worker.transfer.base import KvTransferError

    try:
        return asyncio.run(serve(config, Path(os.environ["FLEET_MODEL_PATH"]), os.environ[POD_IP_ENV]))
    except ModelFilesError as error:
        print(f"BadModel: {error}", file=sys.stderr, flush=True)
        return 2
    except KvTransferError as error:
        print(f"BadTransport: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        print(f"AddressInUse: {error}", file=sys.stderr, flush=True)
        return 2


def apply_ucx(config: WorkerConfig) -> None:
    """UCX reads its environment once, when NIXL is loaded: set it before."""
    from fleet_worker.transfer.transport import ucx_environment

    os.environ.update(ucx_environment(config.kv.transport, config.kv.required, os.environ))


async def serve(config: WorkerConfig, folder: Path, host: str) -> int:
    """Load the model, then answer until told to stop; returns the exit code."""
    from fleet_worker.engine.assemble import assemble

    return await assemble(config, folder, host).run()


if __name__ == "__main__":
    sys.exit(main())
