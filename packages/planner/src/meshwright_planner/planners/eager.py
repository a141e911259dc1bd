"""The default planner: one eager run, every combination of degrees, placements by integer programming."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from torch import nn

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost, ScheduleSpec, discover
from meshwright_dtensor.strategy import Planner, PlanRequest, Strategy
from meshwright_dtensor.strategy.plan_request import unknown
from meshwright_planner.clusters.registry import cluster_of
from meshwright_planner.cost.cost_models import cost_model_of
from meshwright_planner.cost.operations import OPTIMIZERS
from meshwright_planner.evaluation.context import MARGIN, SHARED, Setting, kept_back
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.placement.legal_rows import Rules
from meshwright_planner.placement.pinned import marked
from meshwright_planner.plan_writer.notes import plan_of, reasons
from meshwright_planner.reports.infeasible import infeasible
from meshwright_planner.search.explore import explore
from meshwright_planner.search.optimality import Proof, settle
from meshwright_planner.trace.batch import Batch, check_signature, scaled
from meshwright_planner.trace.recorder.borrow_model import without_garbage_collection


class EagerPlanner(Planner):
    """Searches the degrees of every installed strategy. Deterministic: equal requests give equal plans.

    Args:
        host: where strategies and clusters are found; None discovers what is installed.
        rules: sharding rules; None takes the rule book with its plugins.
    """

    name: ClassVar[str] = "eager"

    def __init__(self, host: PluginHost | None = None, rules: Rules | None = None) -> None:
        self._host, self._rules = host, rules

    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        """See Planner.plan."""
        with without_garbage_collection():
            return self._plan(model, batch, request)

    def _plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        host = self._host or discover()
        setting = self.setting(model, batch, request, host)
        search = Search(setting, self._rules or default_rules())
        explored = explore(search, request.top_k)
        fitting = [c for c in explored.ranked if not c.excess_bytes]
        if not fitting and _may_share(
            setting, request
        ):  # data ranks are asked for: they share where nothing else fits
            pins = {axis: degree for axis, degree in setting.pins.items() if axis not in ("dp", SHARED)}
            search = search.variant(pins=pins, data=request.dp)
            explored = explore(search, request.top_k)
            fitting = [c for c in explored.ranked if not c.excess_bytes]
        ranked = explored.ranked
        if not fitting:
            raise infeasible(search, ranked)
        ranked, proof = settle(search, ranked, explored.every, explored.known)
        proof, only = self.claimed(proof), len(explored.every) == 1
        fitting = [c for c in ranked if not c.excess_bytes]
        return [
            plan_of(
                setting,
                candidate,
                self.name,
                [
                    *reasons(setting, ranked, place, only=only),
                    explored.note,
                    *explored.refused,
                    *_passed_over(setting, host),
                ],
                proof,
            )
            for place, candidate in enumerate(fitting[: request.top_k])
        ]

    def pins(self, request: PlanRequest, strategies: dict[str, Strategy], world_size: int) -> dict[str, int]:
        """The degrees that are fixed; 1 on an axis that nothing owns asks for nothing."""
        pins = {axis: degree for axis, degree in request.pins.items() if axis in strategies}
        if request.dp is not None and SHARED in strategies:
            pins.setdefault(SHARED, 1)
        return pins

    def claimed(self, proof: Proof) -> Proof:
        """What a plan says of how good it is."""
        return proof

    def setting(self, model: nn.Module, batch: Any, request: PlanRequest, host: PluginHost) -> Setting:
        """What a request asks a search for."""
        strategies = installed(host)
        if isinstance(request.schedule, str) and request.schedule:
            host.get(ScheduleSpec, request.schedule)  # a wrong name is said before what it would need
        request.check(strategies)
        if request.optimizer not in OPTIMIZERS:
            raise UsageError(unknown("optimizer", request.optimizer, OPTIMIZERS))
        world_size = request.world_size or running_ranks()
        if world_size > 1 and not strategies:
            raise UsageError(
                f"world_size={world_size}: no strategy is installed that could use it; pip install meshwright-parallel"
            )
        example = Batch.of(batch)
        check_signature(model, example)
        if request.global_batch_size is not None and request.global_batch_size != example.size:
            example = scaled(example, request.global_batch_size)
        cluster = cluster_of(request.cluster, host, world_size).running(world_size)
        axes = [axis for axis, strategy in strategies.items() if strategy.placement_search]
        return Setting(
            model=model,
            batch=example,
            cluster=cluster,
            strategies=strategies,
            optimizer=request.optimizer,
            pins=self.pins(request, strategies, world_size),
            world_size=world_size,
            limit=_limit(cluster, request),
            allowed=cluster.usable_bytes if request.limit_bytes is None else request.limit_bytes,
            stored=marked(model, axes) if request.keep_user_sharding else {},
            options=request.options,
            stage=request.zero or 0,
            precision=request.precision,
            recompute=request.recompute,
            sequence_parallel=request.sequence_parallel,
            time_budget=request.time_budget,
            cost_model=cost_model_of(request.cost_model, cluster, host),
            request=_kept(request, cluster),
        )


def _may_share(setting: Setting, request: PlanRequest) -> bool:
    """Whether the user said how many data ranks there are, and nothing of what they share."""
    asked = request.zero is None and request.zero_degree is None
    return asked and request.dp is not None and SHARED in setting.strategies


def installed(host: PluginHost) -> dict[str, Strategy]:
    """axis -> strategy, outermost axis first; an axis that two strategies own goes to the first by name."""
    loaded: dict[str, Strategy] = {}
    for registered in host.strategies().values():
        strategy = registered.load()
        strategy = strategy() if isinstance(strategy, type) else strategy
        for field in ("name", "axis"):
            said, own = getattr(registered.record, field), getattr(strategy, field)
            if said != own:
                raise PluginError(
                    f"strategy {registered.name!r} of {registered.distribution} is registered with {field} {said!r}, "
                    f"but its class has {field} = {own!r}; make them the same"
                )
        loaded.setdefault(strategy.axis, strategy)
    return dict(sorted(loaded.items(), key=lambda item: (item[1].order, item[0])))


def _passed_over(setting: Setting, host: PluginHost) -> list[str]:
    """A line for each installed strategy that is not searched, since its axis goes to another."""
    searched = {axis: strategy.name for axis, strategy in setting.strategies.items()}
    return [
        f"not searched: strategy {name!r} of {found.distribution}, since {searched[found.record.axis]!r} comes before it "
        f"on the axis {found.record.axis!r}; turn that one off to search it"
        for name, found in host.strategies().items()
        if searched[found.record.axis] != name
    ]


def running_ranks() -> int:
    """Ranks of the running job: torch.distributed's, else torchrun's environment, else 1."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def _kept(request: PlanRequest, cluster: Cluster) -> dict[str, Any]:
    """The keywords that a plan keeps; a file of a cluster by the name in it, since plans go to other machines."""
    given = request.given()
    if isinstance(request.cluster, str) and request.cluster.endswith(".json"):
        given["cluster"] = cluster.name
    return given


def _limit(cluster: Cluster, request: PlanRequest) -> int:
    """What may be predicted; the margin for fragments covers errors of predictions too."""
    if request.limit_bytes is not None:
        return kept_back(request.limit_bytes)
    return kept_back(cluster.usable_bytes, max(0.0, MARGIN - cluster.fragmentation))


def default_rules() -> Rules:
    """The rule book with its plugins."""
    from meshwright_dtensor.rules.book import RuleBook

    return RuleBook.default()
