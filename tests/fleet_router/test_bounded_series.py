"""Counters of what comes and goes are bounded, and those of what is still there never go down."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from fleet_operator.telemetry.scrape import MAX_BYTES
from fleet_router.config import RouterConfig
from fleet_router.explain.inference_metrics import MODELS_MOST, Counts
from fleet_router.explain.record import Record
from fleet_router.follow.documents import Documents
from fleet_router.metrics import REVISIONS_MOST
from fleet_router.process import Router, Settings
from fleet_wire.endpoints import Endpoint, Endpoints
from tests.fleet_router.admission.made import ask_of, lane_of

ADAPTERS_MOST = 64
"""Of a fleet at a time (spec.model.adapters)."""


def documents(revision: str, *adapters: str) -> Documents:
    """Of a tier that stays as it is, and one that gets this revision."""
    ports = {"http_port": 8000, "agent_port": 9000}
    workers = tuple(
        Endpoint(name=tier, uid=f"{tier}-{at}", address="127.0.0.1", **ports, role="decode", tier=tier, revision=at, compat="c")
        for tier, at in (("kept", "first"), ("changed", revision))
    )
    config = RouterConfig(fleet="f", served_name="m", adapters=adapters)
    return Documents(config, Endpoints(fleet="f", namespace="n", workers=workers))


def test_a_revision_that_serves_is_not_forgotten_for_those_of_another_tier():
    """The one that was first seen was: its counters began anew, and the sum over several processes went down by one's, which
    whoever reads it took for a restart of all."""
    router = Router(Settings("dir:/none", "127.0.0.1", 0, Path("/none")))
    metrics = router._context.metrics
    for number in range(2 * REVISIONS_MOST):
        router.apply(documents(f"r{number}"))
        metrics.of("kept", "first").requests += 1
        metrics.of("changed", f"r{number}").requests += 1
    assert 'fleet_router_revision_requests_total{tier="kept",revision="first"} 64' in router.plain(b"/metrics")[2].decode()
    assert len(metrics.served) == REVISIONS_MOST
    assert ("changed", "r63") in metrics.served


def ended(counts: Counts, adapter: str) -> None:
    ask = ask_of()
    ask.adapter = adapter
    counts.ended(Record(("id", "id"), b"/v1/completions", ask, lane_of("acme"), 0.0, False))


def test_a_model_and_its_adapters_are_not_forgotten_for_those_that_were_there_once():
    router = Router(Settings("dir:/none", "127.0.0.1", 0, Path("/none")))
    counts = router._recorder.counts
    for number in range(MODELS_MOST):
        router.apply(documents("r", "kept", f"a{number}"))
        for adapter in ("", "kept", f"a{number}"):
            ended(counts, adapter)
    found = {adapter: model.requests for adapter, model in counts.models.items()}
    assert (len(found), found[""], found["kept"], found[f"a{MODELS_MOST - 1}"]) == (MODELS_MOST, MODELS_MOST, MODELS_MOST, 1)


def test_adapters_that_came_and_went_leave_a_router_as_little_to_say_as_its_operator_reads():
    """Each fills some sixty lines. After months of new ones (64 at a time, with names as long as they may be) there were 5.4 MB
    of them, and the operator, which reads 4 MiB of a router, knew nothing of its load any more."""
    router = Router(Settings("dir:/none", "127.0.0.1", 0, Path("/none")))
    names = [f"{number:0128d}" for number in range(6 * ADAPTERS_MOST)]
    for first in range(0, len(names), ADAPTERS_MOST):
        router.apply(documents(f"r{first}", *names[first : first + ADAPTERS_MOST]))
        for adapter in ("", *names[first : first + ADAPTERS_MOST]):
            ended(router._recorder.counts, adapter)
    counts = router._recorder.counts
    assert {"", *names[-ADAPTERS_MOST:]} <= counts.models.keys()
    assert len(router.plain(b"/metrics")[2]) < MAX_BYTES * 3 // 4  # revisions, tenants and workers have lines, too


def test_what_processes_that_died_had_counted_of_what_is_gone_does_not_add_up_for_ever():
    """Each life left what it had of its adapters and revisions to the next: after a few deaths the operator, which reads 4 MiB
    of a router, knew nothing of its load any more, and after more of them counters fell with each death."""
    place = os.memfd_create("counts", 0)
    try:
        for life in range(6):
            names = [f"{life}{number:0127d}" for number in range(ADAPTERS_MOST)]
            router = Router(Settings("dir:/none", "127.0.0.1", 0, Path("/none"), counts=place))
            asyncio.run(router.answer(b"/metrics"))  # before it knows who serves
            for number in range(REVISIONS_MOST):
                router.apply(documents(f"r{life}-{number}", *names))
                router._context.metrics.of("changed", f"r{life}-{number}").requests += 1
            router._context.metrics.of("kept", "first").requests += 1
            for adapter in ("", *names):
                ended(router._recorder.counts, adapter)
            told = asyncio.run(router.answer(b"/metrics"))[1].decode()
            assert len(told) < MAX_BYTES * 3 // 4 + MAX_BYTES // 8
            assert told.count("fleet_router_revision_requests_total{") <= 2 * REVISIONS_MOST
            assert f'fleet_router_revision_requests_total{{tier="kept",revision="first"}} {life + 1}\n' in told
            assert f'request_total{{model_name="m",target_model_name="m"}} {life + 1}\n' in told
    finally:
        os.close(place)


def test_the_few_revisions_of_a_usual_fleet_are_kept_though_they_are_gone():
    """One that is returned to counts on."""
    place = os.memfd_create("counts", 0)
    try:
        for life in range(3):
            router = Router(Settings("dir:/none", "127.0.0.1", 0, Path("/none"), counts=place))
            router.apply(documents(f"r{life}"))
            router._context.metrics.of("changed", f"r{life}").requests += 1
            told = asyncio.run(router.answer(b"/metrics"))[1].decode()
        for life in range(3):
            assert f'fleet_router_revision_requests_total{{tier="changed",revision="r{life}"}} 1\n' in told
    finally:
        os.close(place)
