"""Metrics under the names of the Gateway API inference extension, where it has one for what we know, so that its dashboards and
alerts work. What only an engine knows (its queue, its KV use) is the engines' to say and is not made up here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from fleet_router.explain.record import Record
from fleet_router.histogram import Histogram

DURATION_S: Final[tuple[float, ...]] = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
    120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
)  # fmt: skip
SIZE_BYTES: Final = tuple(float(2**n) for n in range(6, 24))
DECISION_S: Final[tuple[float, ...]] = (
    0.00001,
    0.00002,
    0.00005,
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
)
"""The extension's, and finer ones below: a decision here takes some 10 µs."""
RATIO: Final[tuple[float, ...]] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MODELS_MOST: Final = 96
"""The model, the 64 adapters that a fleet may have at a time, and some that were there before. Each has some sixty lines, up to
350 bytes long, and who scrapes has a bound: the operator's is 4 MiB."""


@dataclass
class _Model:
    """Of one adapter, or of the model itself."""

    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    durations: Histogram = field(default_factory=lambda: Histogram(DURATION_S))
    sizes: Histogram = field(default_factory=lambda: Histogram(SIZE_BYTES))


@dataclass
class Counts:
    """Everything that requests add to."""

    models: dict[str, _Model] = field(default_factory=dict)
    """By adapter; empty: the model."""
    live: frozenset[str] = frozenset()
    """Adapters that may be asked for now: their counters, and the model's, begin anew for nobody."""
    decisions: Histogram = field(default_factory=lambda: Histogram(DECISION_S))
    hits: Histogram = field(default_factory=lambda: Histogram(RATIO))
    """Of the prompts whose way was decided: the share that whoever was chosen has cached."""

    def ended(self, record: Record) -> None:
        """A request is over."""
        model = self.models.get(record.adapter)
        if model is None:
            if len(self.models) >= MODELS_MOST:
                gone = (adapter for adapter in self.models if adapter and adapter not in self.live)
                self.models.pop(next(gone, next(iter(self.models))))
            model = self.models[record.adapter] = _Model()
        model.requests += 1
        model.sizes.observe(record.prompt_bytes)
        if record.ended == "answered":
            model.durations.observe(record.ended_at - record.came_at)
        if record.error is not None:
            model.errors[record.error.code] += 1

    def lines(self, served_name: str, fleet: str, running: Iterable[str], ready: int, index_keys: int, waiting: int) -> list[str]:
        """Prometheus text. `running`: the adapter of each request that runs; `ready`: workers that serve."""
        name = "inference_objective_"
        served_name, fleet = _escaped(served_name), _escaped(fleet)
        marks = {adapter: _mark(_escaped(adapter) or served_name) for adapter in self.models}
        out = [f"# TYPE {name}request_total counter"]
        out += [f"{name}request_total{{{marks[adapter]}}} {model.requests}" for adapter, model in self.models.items()]
        out += [f"# TYPE {name}request_error_total counter"]
        out += [
            f'{name}request_error_total{{{marks[adapter]},error_code="{code}"}} {count}'
            for adapter, model in self.models.items()
            for code, count in model.errors.items()
        ]
        for kind, of in (("request_duration_seconds", "durations"), ("request_sizes", "sizes")):
            out.append(f"# TYPE {name}{kind} histogram")
            for adapter, model in self.models.items():
                out += getattr(model, of).lines(name + kind, marks[adapter])
        out.append(f"# TYPE {name}running_requests gauge")
        shown = Counter(_escaped(adapter) or served_name for adapter in running) or {served_name: 0}
        out += [f'{name}running_requests{{model_name="{model}"}} {count}' for model, count in shown.items()]
        out += ["# TYPE inference_pool_ready_pods gauge", f'inference_pool_ready_pods{{name="{fleet}"}} {ready}']
        return out + self._of_extension(fleet, index_keys, waiting)

    def _of_extension(self, fleet: str, index_keys: int, waiting: int) -> list[str]:
        name, mark = "inference_extension_", f'name="{fleet}"'
        return [
            f"# TYPE {name}scheduler_e2e_duration_seconds histogram",
            *self.decisions.lines(f"{name}scheduler_e2e_duration_seconds", mark),
            f"# TYPE {name}prefix_indexer_hit_ratio histogram",
            *self.hits.lines(f"{name}prefix_indexer_hit_ratio", mark),
            f"# TYPE {name}prefix_indexer_size gauge", f"{name}prefix_indexer_size{{{mark}}} {index_keys}",
            f"# TYPE {name}flow_control_queue_size gauge",
            f'{name}flow_control_queue_size{{inference_pool="{fleet}"}} {waiting}',
        ]  # fmt: skip


def _mark(model: str) -> str:
    return f'model_name="{model}",target_model_name="{model}"'


def _escaped(name: str) -> str:
    """As a label's value: the API allows no such names, but a router may be given its files by anybody."""
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
