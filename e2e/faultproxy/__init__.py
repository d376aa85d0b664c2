"""A proxy between the operator and kube-apiserver that a test programs while it runs: it records every request, and it kills,
answers, delays, drops, repeats and freezes as told.

    with FaultProxy(plane, seed=7) as proxy:
        operator = start_operator(proxy.kubeconfig(token_file))
        proxy.crash_at(k=3, when="before", kill=operator.kill)
"""

from e2e.faultproxy.faults import Answer, Crash, EventFault
from e2e.faultproxy.ledger import Ledger, Passed, Request
from e2e.faultproxy.proxy import FaultProxy

__all__ = ["Answer", "Crash", "EventFault", "FaultProxy", "Ledger", "Passed", "Request"]
