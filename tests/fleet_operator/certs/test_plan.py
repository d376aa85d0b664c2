"""Renewal with a clock that the test moves: at no moment does a replica serve what the API server does not trust."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fleet_operator.certs.issue import Material, UnusableError, carry_out, read
from fleet_operator.certs.keeper import FILES, Keeper, Place
from fleet_operator.certs.plan import DAY_S, Certificate, Lifetimes, Stock, Work, plan
from fleet_operator.cluster.guarded import GuardedCluster
from fleet_operator.cluster.interface import ClusterError, ForbiddenError, NotFoundError
from fleet_operator.cluster.kinds import MUTATING, SECRET, VALIDATING
from fleet_operator.cluster.memory import MemoryCluster
from fleet_operator.leader.fence import Fence
from fleet_operator.webhook.manifests import configurations

NAMES = frozenset({"hook.ns.svc", "127.0.0.1"})
LIFE = Lifetimes()
T0 = 1_800_000_000.0


def fresh(now: float = T0) -> Material:
    return carry_out(Work("everything", ""), None, NAMES, now, LIFE)


def step(material: Material | None, now: float, *, told: bool = True, names: frozenset[str] = NAMES) -> str:
    return plan(read(material) if material else None, names, now, LIFE, told=told).step


@pytest.mark.parametrize(
    ("after_days", "told", "expected"),
    [(0, True, "nothing"), (59.9, True, "nothing"), (60.1, True, "serving"), (60.1, False, "nothing"), (89.9, False, "nothing"),
     (90.1, False, "serving"), (400, True, "everything"), (-1, True, "everything")],
)  # fmt: skip
def test_what_is_due_when(after_days: float, told: bool, expected: str):
    assert step(fresh(), T0 + after_days * DAY_S, told=told) == expected


def test_no_or_foreign_material_is_made_anew():
    assert step(None, T0) == "everything"
    a, b = fresh(), fresh()
    for bad in (
        Material(a.bundle, b.authority_key, a.certificate, a.key),
        Material(a.bundle, a.authority_key, a.certificate, b.key),
        Material(b"x", b"x", b"x", b"x"),
        Material(a.key, a.key, a.key, a.key),
    ):
        with pytest.raises(UnusableError):
            read(bad)


def test_another_name_needs_another_certificate():
    assert step(fresh(), T0, names=NAMES | {"new.ns.svc"}) == "serving"


def test_the_steps_of_a_new_authority():
    material, now, seen = fresh(), T0 + 244 * DAY_S, []
    stock = read(material)
    # the serving certificate was renewed on its way here
    material = carry_out(Work("serving", ""), material, NAMES, now - DAY_S, LIFE)
    for _ in range(40):
        work = plan(read(material), NAMES, now, LIFE, told=True)
        if work.step == "nothing":
            now += 100.0
            continue
        seen.append((work.step, now))
        material = carry_out(work, material, NAMES, now, LIFE)
    assert [name for name, _ in seen] == ["authority", "serving", "prune"]
    times = [at for _, at in seen]
    assert times[1] - times[0] >= LIFE.settle_s
    assert times[2] - times[1] >= LIFE.settle_s
    assert read(material).authorities[0].key != stock.authorities[0].key


def test_nothing_comes_from_an_authority_that_the_api_server_was_not_told_of():
    old = fresh()
    now = T0 + 244 * DAY_S
    material = carry_out(Work("serving", ""), old, NAMES, now, LIFE)
    material = carry_out(Work("authority", ""), material, NAMES, now, LIFE)
    assert step(material, now + DAY_S, told=False) == "nothing"
    assert step(material, now + DAY_S, told=True) == "serving"


@pytest.mark.parametrize(
    "terms", [{"settle_s": 0.5, "serving_s": 10}, {"settle_s": 60, "serving_s": 599}, {"authority_s": 100 * DAY_S}]
)
def test_lifetimes_without_room_for_an_overlap_are_refused(terms: dict[str, Any]):
    with pytest.raises(ValueError, match=r"settle|half"):
        Lifetimes(**terms)


def test_keys_are_not_shown():
    assert "PRIVATE" not in repr(fresh())
    assert repr(fresh()) == "Material(***)"


# -- several replicas and an API server over years ----------------------------------------------------------------------
SHORT = Lifetimes(authority_s=4_000.0, serving_s=1_000.0, settle_s=100.0)


@dataclass
class Replica:
    keeper: Any
    fence: Fence
    serves: Material | None = None


@dataclass
class World:
    now: float = T0
    store: MemoryCluster = field(default_factory=MemoryCluster)

    def replica(self, names: frozenset[str] = NAMES) -> Replica:
        fence = Fence(lambda: self.now)
        place = Place("ns", "certs", "inferencefleet", names, SHORT)
        keeper = Keeper(GuardedCluster(self.store, fence), place, lambda: self.now)
        replica = Replica(keeper, fence)
        serve = keeper._serve

        def noted(material: Material) -> None:
            serve(material)
            replica.serves = material

        keeper._serve = noted
        return replica

    async def trusted(self) -> list[Certificate]:
        found = []
        for kind in (MUTATING, VALIDATING):
            for hook in (await self.store.get(kind, None, "inferencefleet"))["webhooks"]:
                bundle = base64.b64decode(hook["clientConfig"].get("caBundle", ""))
                found.append(frozenset(one.key for one in _authorities(bundle)))
        return found  # type: ignore[return-value]


def _authorities(bundle: bytes) -> tuple[Certificate, ...]:
    from fleet_operator.certs.issue import _summary

    return tuple(_summary(one, {}) for one in x509.load_pem_x509_certificates(bundle)) if bundle else ()


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(pauses=st.lists(st.tuples(st.sampled_from([5.0, 20.0, 40.0]), st.integers(0, 2)), min_size=120, max_size=160))
def test_replicas_serve_only_what_is_trusted_and_valid(pauses: list[tuple[float, int]]):
    """Three replicas, one of which leads; each looks now and then. Over several lives of an authority."""

    async def scenario() -> None:
        world = World()
        for configuration in configurations({"service": {"name": "hook", "namespace": "ns", "port": 443}}):
            await world.store.apply(configuration)
        replicas = [world.replica() for _ in range(3)]
        for count, (pause_s, leads) in enumerate(pauses):
            world.now += pause_s
            for index, replica in enumerate(replicas):
                replica.fence.close()
                if index == leads:
                    replica.fence.extend(world.now + 1e6, world.now + 1e6)
                while await replica.keeper.look():
                    pass
            if count < 3:
                continue
            trusted = await world.trusted()
            for replica in replicas:
                assert replica.serves is not None
                stock: Stock = read(replica.serves)
                assert stock.serving.not_before <= world.now < stock.serving.not_after
                for keys in trusted:
                    issuers = {one.key for one in stock.authorities if one.key in keys}  # type: ignore[attr-defined]
                    assert stock.serving.issuer in issuers

    asyncio.run(scenario())


def test_two_replicas_that_begin_at_once_make_one_authority():
    async def scenario() -> None:
        world = World()
        replicas = [world.replica() for _ in range(2)]
        await world.store.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "certs", "namespace": "ns"}})
        for replica in replicas:
            replica.fence.extend(T0 + 1e6, T0 + 1e6)
        for _ in range(3):
            await asyncio.gather(*(replica.keeper.look() for replica in replicas))
        assert replicas[0].serves == replicas[1].serves
        assert len((await world.store.get(SECRET, "ns", "certs"))["data"]) == 4

    asyncio.run(scenario())


def test_of_two_that_read_the_same_secret_one_renews():
    """Else the second one's authority takes the place of the first one's, which the API server may have been told of."""

    async def scenario() -> None:
        world = World()
        replicas = [world.replica() for _ in range(2)]
        await world.store.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "certs", "namespace": "ns"}})
        get = world.store.get

        async def together(*where: Any) -> Any:
            found = await get(*where)
            await asyncio.sleep(0)
            return found

        world.store.get = together  # type: ignore[method-assign]
        for replica in replicas:
            replica.fence.extend(T0 + 1e6, T0 + 1e6)
        assert sorted(await asyncio.gather(*(replica.keeper.look() for replica in replicas))) == [False, True]

    asyncio.run(scenario())


def test_a_configuration_that_went_is_not_made_anew_by_telling_it():
    """What is written is a part of one: without paths, rules and the rest."""

    async def scenario() -> None:
        world = World()
        one = world.replica()
        one.fence.extend(T0 + 1e6, T0 + 1e6)
        (made, *_) = configurations({"service": {"name": "hook", "namespace": "ns", "port": 443}})
        await world.store.apply(made)
        assert await one.keeper.look()
        get = world.store.get

        async def uninstalled(kind: Any, *where: Any) -> Any:
            found = await get(kind, *where)
            if kind == MUTATING:
                await world.store.delete(kind, None, "inferencefleet")
            return found

        world.store.get = uninstalled  # type: ignore[method-assign]
        with contextlib.suppress(ClusterError):
            await one.keeper.look()
        with pytest.raises(NotFoundError):
            await get(MUTATING, None, "inferencefleet")

    asyncio.run(scenario())


def test_a_replica_that_may_not_write_waits_and_then_serves():
    async def scenario() -> None:
        world = World()
        follower, leader = world.replica(), world.replica()
        assert not await follower.keeper.look()
        assert not follower.keeper.ready.is_set()
        leader.fence.extend(T0 + 1e6, T0 + 1e6)
        assert await leader.keeper.look()
        await follower.keeper.look()
        assert follower.keeper.ready.is_set()

    asyncio.run(scenario())


def test_a_spoiled_secret_is_replaced():
    async def scenario() -> None:
        world = World()
        one = world.replica()
        one.fence.extend(T0 + 1e6, T0 + 1e6)
        for data in ({}, {"ca.crt": "!"}, {name: "eA==" for name in ("ca.crt", "ca.key", "tls.crt", "tls.key")}):
            meta = {"name": "certs", "namespace": "ns"}
            await world.store.writer("user").apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})
            assert await one.keeper.look()
            assert not await one.keeper.look()

    asyncio.run(scenario())


@pytest.mark.parametrize("expired", [False, True])
def test_a_secret_that_was_emptied_under_way_is_filled_without_a_gap(expired: bool):
    """The leader made everything anew and told the API server at once: until they looked, the other replicas served what nobody
    trusted any more."""

    async def scenario() -> None:
        world = World()
        for configuration in configurations({"service": {"name": "hook", "namespace": "ns", "port": 443}}):
            await world.store.apply(configuration)
        leader, follower = world.replica(), world.replica()
        leader.fence.extend(T0 + 1e9, T0 + 1e9)

        async def look(*replicas: Replica) -> None:
            for replica in replicas:
                while await replica.keeper.look():
                    pass

        async def trusts(replica: Replica) -> bool:
            assert replica.serves is not None
            return all(read(replica.serves).serving.issuer in keys for keys in await world.trusted())  # type: ignore[operator]

        await look(leader, follower)
        before = leader.serves
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "certs", "namespace": "ns"}}
        await world.store.delete(SECRET, "ns", "certs")
        await world.store.writer("user").apply(secret)
        world.now += SHORT.serving_s if expired else 0.0
        await look(leader)
        assert await trusts(follower) is not expired  # what is over cannot be served on
        await look(follower, leader)
        assert await trusts(leader)
        world.now += SHORT.settle_s
        await look(leader, follower)
        world.now += SHORT.settle_s
        await look(leader, follower)
        assert leader.serves == follower.serves
        assert leader.serves is not None
        assert before is not None
        assert before.key != leader.serves.key
        assert len(read(leader.serves).authorities) == 1, "what was there before is trusted no more"

    asyncio.run(scenario())


def of_others(authority_bits: int, serving_bits: int) -> Material:
    """As somebody made it with other tools: RSA, and perhaps too short for TLS."""
    begins, ends = (datetime.fromtimestamp(at, UTC) for at in (T0 - DAY_S, T0 + 90 * DAY_S))
    signer, own = (rsa.generate_private_key(65_537, bits) for bits in (authority_bits, serving_bits))
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "serving")]
    made = []
    for subject, key in zip(names, (signer, own), strict=True):
        builder = x509.CertificateBuilder(names[0], subject, key.public_key(), len(made) + 1, begins, ends)
        made.append(builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    keys = [key.private_bytes(serialization.Encoding.PEM, pkcs8, plain) for key in (signer, own)]
    return Material(made[0], keys[0], made[1], keys[1])


@pytest.mark.parametrize("names", [NAMES, frozenset[str]()], ids=["another-name", "every-name"])
@pytest.mark.parametrize(("authority_bits", "serving_bits"), [(2048, 2048), (1024, 1024)])
def test_certificates_that_others_made_end_no_operator(authority_bits: int, serving_bits: int, names: frozenset[str]):
    """We cannot sign with such a key, and TLS takes none that short: the operator ended, and again at every start."""

    async def scenario() -> None:
        world = World()
        one = world.replica(names)
        one.fence.extend(T0 + 1e6, T0 + 1e6)
        given = of_others(authority_bits, serving_bits)
        pems = (given.bundle, given.authority_key, given.certificate, given.key)
        data = {name: base64.b64encode(pem).decode() for name, pem in zip(FILES, pems, strict=True)}
        meta = {"name": "certs", "namespace": "ns"}
        await world.store.writer("user").apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})
        assert await one.keeper.look()
        assert not await one.keeper.look()
        assert one.keeper.ready.is_set()

    asyncio.run(scenario())


def test_without_the_right_to_the_configurations_it_still_serves():
    async def scenario() -> None:
        world = World()
        one = world.replica()
        one.fence.extend(T0 + 1e6, T0 + 1e6)
        get = world.store.get

        async def partly(kind: Any, *where: Any) -> Any:
            if kind in (MUTATING, VALIDATING):
                raise ForbiddenError("no")
            return await get(kind, *where)

        world.store.get = partly  # type: ignore[method-assign]
        assert await one.keeper.look()
        assert not await one.keeper.look()
        assert one.keeper.ready.is_set()

    asyncio.run(scenario())
