"""The thin shell around `plan`: reads the Secret, renews, tells the API server whom to trust, supplies the server.

Every replica reads; whoever may write (the leader) renews, and a resourceVersion keeps two from renewing at once. The private
keys are in the Secret and in memory, never on a disk, in a log line or in an error.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fleet_operator.certs.issue import Material, UnusableError, carry_out, read
from fleet_operator.certs.plan import Lifetimes, Stock, Work, plan
from fleet_operator.cluster.interface import Cluster, ClusterError, ConflictError, ForbiddenError, NotFoundError, Object
from fleet_operator.cluster.kinds import MUTATING, SECRET, VALIDATING
from fleet_operator.leader.fence import NotLeaderError

LOG = logging.getLogger("fleet.operator.certs")
FILES: Final = ("ca.crt", "ca.key", "tls.crt", "tls.key")
RETRY_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where certificates are kept and who needs them."""

    namespace: str
    secret: str
    configuration: str
    """Name of the mutating and of the validating webhook configuration."""
    names: frozenset[str]
    """DNS names and addresses that the API server calls."""
    life: Lifetimes = field(default_factory=Lifetimes)
    look_s: float = 20.0
    """Between two looks at the Secret; several fit into `life.settle_s`."""


class Keeper:
    """Keeps one ssl context supplied."""

    def __init__(self, cluster: Cluster, place: Place, now: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._place = place
        self._now = now
        self._loaded: bytes = b""
        self._served: Material | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.ready = asyncio.Event()
        """Set once the context has a certificate."""

    async def run(self) -> None:
        """For ever; failures are logged and tried again."""
        while True:
            try:
                moved = await self.look()
                pause_s = 0.0 if moved else self._place.look_s if self.ready.is_set() else RETRY_S
            except ClusterError as error:
                pause_s = RETRY_S if not self.ready.is_set() else self._place.look_s
                then = "what is served goes on until it expires" if self.ready.is_set() else "admission reviews are not answered"
                LOG.warning("webhook certificates: %s: %s; %s; again in %g s", error.reason, error, then, pause_s)
            await asyncio.sleep(pause_s)

    async def look(self) -> bool:
        """Once: read, perhaps one step of renewal, serve, tell. Whether a step was made."""
        secret = await self._secret()
        material, stock = _material(secret), None
        if material is not None:
            try:
                stock = read(material)
                if material.certificate != self._loaded:
                    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), material)
            except UnusableError as error:
                LOG.warning("Secret %s/%s is not usable: %s", self._place.namespace, self._place.secret, error)
                material = stock = None
        untold = await self._untold(material.bundle) if material is not None else []
        moved = await self._renew(secret, material, stock, told=untold == [])
        if not moved and material is not None:
            self._serve(material)
            await self._tell(untold or [], material.bundle)
        return moved

    async def _secret(self) -> Object:
        where = self._place
        try:
            return await self._cluster.get(SECRET, where.namespace, where.secret)
        except NotFoundError:
            return {"metadata": {"name": where.secret, "namespace": where.namespace}}

    async def _renew(self, secret: Object, material: Material | None, stock: Stock | None, *, told: bool) -> bool:
        where, now = self._place, self._now()
        work = plan(stock, where.names, now, where.life, told=told)
        if work.step == "nothing":
            return False
        fresh = self._in_steps(now) if work.step == "everything" else None
        fresh = fresh or carry_out(work, material, where.names, now, where.life)
        try:
            await self._cluster.apply(_secret_of(where, secret, fresh))
        except (ConflictError, NotLeaderError):
            return False  # another replica does it, or did it: the next look sees
        LOG.info("webhook certificates: %s: %s", work.step, work.reason)
        return True

    def _in_steps(self, now: float) -> Material | None:
        """Of a Secret that somebody emptied: what it had, with another authority beside it. Other replicas serve that until they
        look, and it must be trusted as long. None: there was nothing that could be served on."""
        where, served = self._place, self._served
        if served is None:
            return None
        stock = read(served)
        if plan(stock, where.names, now, where.life, told=False).step in ("everything", "serving"):
            return None
        if stock.serving.issuer != stock.authorities[-1].key:  # there is another one, and not all have come to it
            return served
        return carry_out(Work("authority", "the Secret lost what is served"), served, where.names, now, where.life)

    def _serve(self, material: Material) -> None:
        self._served = material
        if self._loaded != material.certificate:
            _load(self.context, material)
            self._loaded = material.certificate
            self.ready.set()
            LOG.info("serving a new certificate")

    async def _untold(self, bundle: bytes) -> list[Object] | None:
        """Webhook configurations that do not trust the whole bundle; None when we may not know."""
        wanted, found = base64.b64encode(bundle).decode(), []
        for kind in (MUTATING, VALIDATING):
            try:
                configuration = await self._cluster.get(kind, None, self._place.configuration)
            except NotFoundError:
                continue
            except ForbiddenError as error:
                LOG.warning("the webhook configuration cannot be told whom to trust: %s", error)
                return None
            if any(hook["clientConfig"].get("caBundle") != wanted for hook in configuration.get("webhooks") or []):
                found.append(configuration)
        return found

    async def _tell(self, untold: list[Object], bundle: bytes) -> None:
        """caBundle of every webhook of these."""
        wanted = base64.b64encode(bundle).decode()
        for found in untold:
            said = [{"name": hook["name"], "clientConfig": {"caBundle": wanted}} for hook in found["webhooks"]]
            root = {"apiVersion": found["apiVersion"], "kind": found["kind"]}
            metadata = {"name": self._place.configuration, "uid": found["metadata"]["uid"]}
            try:
                await self._cluster.apply({**root, "metadata": metadata, "webhooks": said})
                LOG.info("told %s %s whom to trust", found["kind"], self._place.configuration)
            except NotLeaderError:
                return


def _material(secret: Object) -> Material | None:
    data = secret.get("data") or {}
    try:
        bundle, authority_key, certificate, key = (base64.b64decode(data.get(name) or "", validate=True) for name in FILES)
    except (binascii.Error, ValueError, TypeError):
        return None
    return Material(bundle, authority_key, certificate, key) if all((bundle, authority_key, certificate, key)) else None


def _secret_of(where: Place, seen: Object, material: Material) -> Object:
    metadata = {"name": where.secret, "namespace": where.namespace}
    if version := seen["metadata"].get("resourceVersion"):
        metadata["resourceVersion"] = version
    pems = (material.bundle, material.authority_key, material.certificate, material.key)
    data = {name: base64.b64encode(pem).decode() for name, pem in zip(FILES, pems, strict=True)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}


def _load(context: ssl.SSLContext, material: Material) -> None:
    """Python's ssl reads files only: one that exists in memory alone. UnusableError when TLS takes no such key."""
    descriptor = os.memfd_create("webhook", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, material.certificate + material.key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except ssl.SSLError as error:
        raise UnusableError(str(error)) from error
    finally:
        os.close(descriptor)
