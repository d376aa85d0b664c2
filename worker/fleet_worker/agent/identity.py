"""Who this worker is: environment → typed configuration and pod identity."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fleet_worker.agent.errors import ConfigError
from fleet_worker.config import CONFIG_ENV, POD_IP_ENV, POD_NAME_ENV, POD_UID_ENV, ROLE_ENV, Role, WorkerConfig, decode


@dataclass(frozen=True, slots=True)
class Identity:
    """What only the kubelet knows."""

    pod_name: str
    pod_uid: str
    pod_ip: str


def read_identity(env: Mapping[str, str]) -> tuple[WorkerConfig, Identity]:
    """Parse the environment; ConfigError names the variable that is missing or wrong."""
    config = _read_config(env)
    identity = Identity(_required(env, POD_NAME_ENV), _required(env, POD_UID_ENV), _required(env, POD_IP_ENV))
    try:
        ipaddress.ip_address(identity.pod_ip)
    except ValueError as error:
        raise ConfigError(f"{POD_IP_ENV}: {error}") from error
    if config.engine == "torch" and config.engine_args:
        raise ConfigError(f"{CONFIG_ENV}: engine_args: the torch engine takes none, got {list(config.engine_args)}")
    return msgspec.structs.replace(config, role=_role(env, config.role)), identity


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
    except msgspec.DecodeError as error:
        raise ConfigError(f"{CONFIG_ENV}: {error}") from error


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise ConfigError(f"{name}: not set; the operator renders it into every worker pod")
    return value
