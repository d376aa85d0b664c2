"""Who this worker is: environment → typed configuration and pod identity."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fleet_wire.unreadable import UNREADABLE
from fleet_worker.agent.errors import ConfigError
from fleet_worker.config import (
    CONFIG_ENV,
    GROUP_UID_ENV,
    LEADER_ENV,
    MEMBER_ENV,
    POD_IP_ENV,
    POD_NAME_ENV,
    POD_UID_ENV,
    ROLE_ENV,
    Role,
    WorkerConfig,
    decode,
    step_timeout_s,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """What only the kubelet knows."""

    pod_name: str
    pod_uid: str
    pod_ip: str
    member: int = 0
    """Place in a worker over several nodes; 0 leads."""
    leader: str = ""
    """Host name of the leader."""
    group_uid: str = ""
    """Uid of the leader's pod."""


def read_identity(env: Mapping[str, str]) -> tuple[WorkerConfig, Identity]:
    """Parse the environment; ConfigError names the variable that is missing or wrong."""
    config = _read_config(env)
    uid = _required(env, POD_UID_ENV)
    identity = Identity(_required(env, POD_NAME_ENV), uid, _required(env, POD_IP_ENV), *_place(env, config.nodes, uid))
    try:
        ipaddress.ip_address(identity.pod_ip)
    except ValueError as error:
        raise ConfigError(f"{POD_IP_ENV}: {error}") from error
    if config.engine == "torch" and config.engine_args:
        raise ConfigError(f"{CONFIG_ENV}: engine_args: the torch engine takes none, got {list(config.engine_args)}")
    try:
        step_timeout_s(env)  # the engine reads it: said here, it is a problem of the configuration and not of an engine
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return msgspec.structs.replace(config, role=_role(env, config.role)), identity


def _place(env: Mapping[str, str], nodes: int, uid: str) -> tuple[int, str, str]:
    """(member, leader's name, leader's uid) of a pod of a group; the leader's uid is its own."""
    if nodes == 1:
        return 0, "", uid
    text = _required(env, MEMBER_ENV)
    if not text.isdecimal() or int(text) >= nodes:
        raise ConfigError(f"{MEMBER_ENV}: {text!r} is no place in a group of {nodes}")
    leader = _required(env, LEADER_ENV)
    return int(text), leader, uid if int(text) == 0 else _required(env, GROUP_UID_ENV)


def _role(env: Mapping[str, str], role: Role) -> Role:
    """The label's, when the pod has one: it outlives the configuration."""
    try:
        found: Role = msgspec.convert(env.get(ROLE_ENV) or role, Role)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{ROLE_ENV}: {error}") from error
    return found


def _read_config(env: Mapping[str, str]) -> WorkerConfig:
    raw = _required(env, CONFIG_ENV)
    try:
        return decode(raw)
    except UNREADABLE as error:
        raise ConfigError(f"{CONFIG_ENV}: {error}") from error


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise ConfigError(f"{name}: not set; the operator renders it into every worker pod")
    return value
