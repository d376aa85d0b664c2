"""Version v1alpha1 of the group inferencefleet.io."""

from fleet_api.v1alpha1.accelerator import AcceleratorSpec, ParallelismSpec
from fleet_api.v1alpha1.admission import SloClassSpec, TenantsSpec
from fleet_api.v1alpha1.base import API_VERSION, GROUP, VERSION, Metadata
from fleet_api.v1alpha1.fabric import KvTransferSpec
from fleet_api.v1alpha1.fleet import FleetSpec, InferenceFleet
from fleet_api.v1alpha1.model import ClaimSource, EngineSpec, FileSource, HubSource, ModelSpec, Source
from fleet_api.v1alpha1.pool import PoolSpec, WorkerPool
from fleet_api.v1alpha1.rollout import AnalysisSpec, CanarySpec, RolloutSpec
from fleet_api.v1alpha1.routing import (
    AnswerCheckSpec,
    BudgetSpec,
    CascadeSpec,
    LatencySpec,
    LimitsSpec,
    LoadSpec,
    PrometheusSpec,
    RemotePrefillSpec,
    RoutingSpec,
    ScalingSpec,
    SloSpec,
    TargetInflightSpec,
    TelemetrySpec,
)
from fleet_api.v1alpha1.status import (
    Condition,
    FleetStatus,
    FleetSummary,
    KvStatus,
    PoolStatus,
    RoleStatus,
    RolloutStatus,
    TierStatus,
)
from fleet_api.v1alpha1.tier import RatioSpec, Role, RoleSpec, TierModelSpec, TierSpec

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "AcceleratorSpec",
    "AnalysisSpec",
    "AnswerCheckSpec",
    "BudgetSpec",
    "CanarySpec",
    "CascadeSpec",
    "ClaimSource",
    "Condition",
    "EngineSpec",
    "FileSource",
    "FleetSpec",
    "FleetStatus",
    "FleetSummary",
    "HubSource",
    "InferenceFleet",
    "KvStatus",
    "KvTransferSpec",
    "LatencySpec",
    "LimitsSpec",
    "LoadSpec",
    "Metadata",
    "ModelSpec",
    "ParallelismSpec",
    "PoolSpec",
    "PoolStatus",
    "PrometheusSpec",
    "RatioSpec",
    "RemotePrefillSpec",
    "Role",
    "RoleSpec",
    "RoleStatus",
    "RolloutSpec",
    "RolloutStatus",
    "RoutingSpec",
    "ScalingSpec",
    "SloClassSpec",
    "SloSpec",
    "Source",
    "TargetInflightSpec",
    "TelemetrySpec",
    "TenantsSpec",
    "TierModelSpec",
    "TierSpec",
    "TierStatus",
    "WorkerPool",
]
