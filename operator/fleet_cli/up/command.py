"""`fleet up`: read, check, start, show, prove, drain."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet_api.parse import parse_fleet
from fleet_api.structure import normalised
from fleet_api.v1alpha1 import InferenceFleet, KvStatus
from fleet_cli.errors import EXIT_KILLED, EXIT_OK, RunError
from fleet_cli.manifest import check, read_manifest
from fleet_cli.up.bundled import bundled_manifest, tiny_model, vllm_program
from fleet_cli.up.client import Client
from fleet_cli.up.local import LocalFleet
from fleet_cli.up.named import check_named, hub_secrets
from fleet_cli.up.preflight import check_engine, check_memory, check_model, check_port, free_bytes
from fleet_cli.up.proof import COUNTERS_WAIT_S, Check, Ground, check_provable, output_tokens, prove, sample_prompt
from fleet_cli.up.routerport import router_secrets
from fleet_cli.up.screen import Screen, open_screen
from fleet_cli.up.state import state_folder
from fleet_cli.up.stops import Stops, until
from fleet_cli.up.tenants import local_tenants
from fleet_cli.up.view import Snapshot, curl_line, fatal, kv_at_last, kv_line, snapshot
from fleet_operator.runtime.settings import RuntimeSettings
from fleet_operator.telemetry.collect import FleetTelemetry, open_telemetry

POLL_S = 0.25
READY_TIMEOUT_ONCE_S = 600.0
"""--once runs where nobody watches; without it a person may wait as long as a download takes."""
DRAIN_TIMEOUT_S = 60.0
FIRST_TOKENS = 16
INTERVALS = 3
"""Of telemetry, until a status has what engines counted."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the user asked for."""

    file: str | None
    once: bool
    port: int
    state: Path | None
    claims: Mapping[str, Path]
    tenants: Path | None = None


def up(options: UpOptions) -> int:
    """Run the command; raises CliError with the cause when it cannot."""
    check_port(options.port)
    begun = time.monotonic()
    with open_screen() as screen:
        manifest = _manifest(options, screen)
        fleet = parse_fleet(manifest)
        if options.once:
            check_provable(fleet)
        check_model(fleet, options.claims)
        check_engine(fleet, vllm_program())
        check_memory(fleet, free_bytes())
        tenants = local_tenants(fleet, options.tenants)
        secrets = [*([tenants.secret] if tenants is not None else []), *router_secrets(fleet), *hub_secrets(fleet, os.environ)]
        check_named(fleet, options.claims, secrets)
        with state_folder(options.state) as folder:
            local = LocalFleet(
                manifest=manifest,
                state_dir=folder,
                port=options.port,
                claims=options.claims,
                secrets=secrets,
                settings=RuntimeSettings(alone=True),
            )
            key = tenants.key if tenants is not None else ""
            return asyncio.run(_Session(options, fleet, local, screen, begun, key).run())


def _manifest(options: UpOptions, screen: Screen) -> dict[str, Any]:
    if options.file is not None:
        manifest = read_manifest(options.file)
        screen.say(f"fleet {manifest['metadata']['name']} from {options.file}")
    else:
        screen.say("the bundled fleet on a tiny Llama (made once, then cached)")
        manifest = bundled_manifest(tiny_model())
        check(manifest)
    return as_new(manifest)


def as_new(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as it creates a fleet: null is absent, what a server writes (`kubectl get -o yaml` shows it) is not wanted
    state, and foreign finalizers or owners would keep the fleet from going or make it go."""
    manifest = normalised(manifest)
    written = manifest["metadata"]
    kept = {key: written[key] for key in ("name", "labels", "annotations") if written.get(key) is not None}
    metadata = {**kept, "namespace": written.get("namespace") or "default"}
    return {**{key: value for key, value in manifest.items() if key != "status"}, "metadata": metadata}


@dataclass(slots=True)
class _Session:
    """One run, from the first process to the last."""

    options: UpOptions
    fleet: InferenceFleet
    local: LocalFleet
    screen: Screen
    begun: float
    key: str = field(default="", repr=False)
    """API key for requests of ours; empty: none is needed."""
    came_up: bool = False

    async def run(self) -> int:
        stops = Stops()
        stops.install()
        async with self.local:
            try:
                code = await until(stops.drain, self._work())
            finally:
                drained = await self._drain(stops)
        if code is not None:
            return code
        if self.options.once:  # whoever asked for the proof must not take an end for it
            self.screen.say("interrupted before the proof was there")
            return EXIT_KILLED
        return EXIT_OK if drained else EXIT_KILLED

    async def _work(self) -> int:
        await self._until_ready()
        if self.options.once:
            return await self._prove()
        await self._offer()
        while True:
            await self._look()
            await asyncio.sleep(POLL_S)

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_ONCE_S
        while not (shown := await self._look()).complete:
            if self.options.once and time.monotonic() > deadline:
                condition = shown.status.condition("Ready")
                why = f"{condition.reason}: {condition.message}" if condition else "the operator wrote no status"
                raise RunError(f"not ready after {READY_TIMEOUT_ONCE_S:g} s: {why}")
            await asyncio.sleep(POLL_S)
        self.came_up = True
        self.screen.say(f"ready after {time.monotonic() - self.begun:.1f} s")

    async def _look(self) -> Snapshot:
        """Show the newest state; CliError when the fleet cannot come up or the operator died."""
        self.local.raise_if_dead()
        pods, status = await self.local.observe()
        seen = snapshot(pods, status)
        self.screen.show(seen)
        if not self.came_up and (error := fatal(pods)) is not None:
            raise error
        return seen

    async def _offer(self) -> None:
        """Send what the user is invited to paste, so that it is known to work, and show what it moved. A fleet that does not
        answer it (a model that only embeds, a CPU that takes minutes) serves others all the same."""
        tokens = output_tokens(self.fleet, FIRST_TOKENS)
        prompt = sample_prompt(self.fleet, tokens)
        async with Client(self.local.router_url, self.fleet.served_name, key=self.key) as client:
            try:
                answer = await client.stream(prompt, tokens)
            except RunError as error:
                self.screen.say(f"the first request failed: {error}")
            else:
                first = time.monotonic() - self.begun
                nonsense = "" if self.options.file else " (random weights: the words mean nothing)"
                self.screen.say(f"first tokens after {first:.1f} s: {answer.text!r}{nonsense}")
        url, model = self.local.router_url, self.fleet.served_name
        curl = curl_line(url, model, tokens=tokens, prompt=prompt, keyed=bool(self.key))
        self.screen.block(f"OpenAI endpoint: {url}/v1   model: {model}\nTry it:\n\n{curl}")
        self.screen.say(f"logs: {self.local.logs}; Ctrl-C stops everything")

    async def _prove(self) -> int:
        async with open_telemetry() as asking:
            checks = await self._checks(asking)
        for done in checks:
            self.screen.say(str(done))
        failed = [done.name for done in checks if not done.ok]
        self.screen.say(f"proof: {len(checks) - len(failed)} of {len(checks)} checks passed")
        if failed:
            raise RunError(f"failed: {', '.join(failed)}")
        return EXIT_OK

    async def _checks(self, asking: FleetTelemetry) -> list[Check]:
        # what the status says is part of the proof, unless it comes too late for it
        late = self.fleet.spec.telemetry.interval_s * INTERVALS > COUNTERS_WAIT_S

        async def counters() -> KvStatus:
            counted = await self.local.counted(self.fleet, asking) if late else []
            return kv_at_last((await self._look()).status, counted)

        ground = Ground(
            fleet=self.fleet,
            router_url=self.local.router_url,
            prefill_url=self.local.prefill_url,
            counters=counters,
            key=self.key,
        )
        return await prove(ground, salt=f"{time.time_ns():x}")

    async def _drain(self, stops: Stops) -> bool:
        """Delete the fleet and wait for its pods, bounded; False when a second signal or the clock cut it short."""
        stops.drain.set()
        self.screen.say("stopping: workers finish what they run (Ctrl-C again kills)")
        try:
            pods, status = await self.local.observe()
            last = snapshot(pods, status, stopping=True)
            moved = kv_at_last(last.status, await self.local.counted(self.fleet))
            drained = await until(stops.kill, self._gone(status))
        except TimeoutError:
            self.screen.say(f"not drained within {DRAIN_TIMEOUT_S:g} s: killing what is left")
            return False
        if not drained:
            return False
        self.screen.say(f"stopped; {kv_line(moved)}")
        return True

    async def _gone(self, status: Mapping[str, Any]) -> bool:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            await self.local.delete()
            while True:
                pods, _ = await self.local.observe()
                self.screen.show(snapshot(pods, status, stopping=True))
                if not pods:
                    return True
                if not self.local.can_drain():  # nobody is left who would end them
                    self.screen.say("what runs pods has ended: killing what is left")
                    return False
                await asyncio.sleep(POLL_S)
