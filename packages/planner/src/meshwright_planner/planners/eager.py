"""The default planner: one eager run, all combinations of degrees, placements by integer programming."""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost, ScheduleSpec, discover
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.strategy import Planner, PlanRequest, Strategy
from meshwright_dtensor.strategy.plan_request import AUTO, unknown
from meshwright_dtensor.utils.process import without_garbage_collection
from meshwright_planner.clusters.registry import cluster_of
from meshwright_planner.cost.cost_models import cost_model_of
from meshwright_planner.cost.optimizers import NAMES
from meshwright_planner.evaluation.candidate import Candidate, rank
from meshwright_planner.evaluation.context import MARGIN, SHARED, Setting, kept_back
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.placement.problem import marked
from meshwright_planner.plan_writer.compile_rules import compile_rules
from meshwright_planner.plan_writer.notes import plan_of, reasons
from meshwright_planner.reports.infeasible import infeasible
from meshwright_planner.search.explore import Choice, explore
from meshwright_planner.search.optimality import Proof, settle
from meshwright_planner.trace.batch import Batch, check_signature, scaled

_LOG = logging.getLogger(__name__)


class EagerPlanner(Planner):
    """Searches the degrees of every installed strategy. Deterministic: equal requests give equal plans.

    Args:
        host: where strategies and clusters are found; None discovers what is installed.
        rules: sharding rules; None takes the rule book with its plugins.
    """

    name: ClassVar[str] = "eager"

    def __init__(self, host: PluginHost | None = None, rules: RuleBook | None = None) -> None:
        self._host, self._rules = host, rules

    @without_garbage_collection()
    def plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        """See Planner.plan."""
        host = self._host or discover()
        _LOG.info("running %s on tensors without values", type(model).__name__)
        setting = self.setting(model, batch, request, host)
        choice = self.choose(Search(setting, self._rules or default_rules()), request)
        if all(c.excess_bytes for c in choice.ranked):
            raise infeasible(choice.search, sorted(choice.ranked, key=rank))
        _LOG.info("proving how far the best is from any other")
        ranked, proof = self.proven(choice)
        searched = {axis: strategy.name for axis, strategy in setting.strategies.items()}
        notes, only = list(choice.notes), len(choice.legal) == 1
        notes += (
            f"not searched: strategy {name!r} of {registered.distribution}, because {searched[registered.record.axis]!r} comes "
            f"before it on the axis {registered.record.axis!r}; disable that one to search this one"
            for name, registered in host.strategies().items()
            if searched[registered.record.axis] != name
        )
        shown = [place for place, c in enumerate(ranked) if not c.excess_bytes][: request.top_k]
        why = {place: [*reasons(setting, ranked, place, only=only), *notes] for place in shown}
        return [plan_of(setting, ranked[place], self.name, lines, proof) for place, lines in why.items()]

    def choose(self, search: Search, request: PlanRequest) -> Choice:
        """Search all configurations of the request.

        Raises:
            UsageError: no combination of degrees is legal.
            PlanError: strategies refuse every one of them.
        """
        choice = explore(search, request.top_k)
        is_open = request.zero is None and request.zero_degree is None and request.dp is not None
        if all(c.excess_bytes for c in choice.ranked) and is_open and SHARED in search.setting.strategies:
            # only dp is pinned and nothing fits, so let data ranks share training state
            pins = {a: degree for a, degree in search.setting.pins.items() if a not in ("dp", SHARED)}
            choice = explore(search.variant(pins=pins, data=request.dp), request.top_k)
        return choice

    def proven(self, choice: Choice) -> tuple[list[Candidate], Proof]:
        """The candidates, best first, with those that the proof adds; and the proof."""
        return settle(choice.search, choice.ranked, choice.legal, choice.by_point)

    def pins(self, request: PlanRequest, strategies: dict[str, Strategy], world_size: int) -> dict[str, int]:
        """The pinned degrees. A pin of 1 on an axis without a strategy is dropped."""
        pins = {axis: degree for axis, degree in request.pins.items() if axis in strategies}
        if request.dp is not None and SHARED in strategies:
            pins.setdefault(SHARED, 1)
        return pins

    def setting(self, model: nn.Module, batch: Any, request: PlanRequest, host: PluginHost) -> Setting:
        """The search problem of a request."""
        strategies = installed(host)
        if isinstance(request.schedule, str) and request.schedule:
            # report an unknown name before what a schedule needs
            host.get(ScheduleSpec, request.schedule)
        request.check(strategies)
        if request.optimizer not in NAMES:
            raise UsageError(unknown("optimizer", request.optimizer, NAMES))
        world_size = request.world_size or running_ranks()
        if world_size > 1 and not strategies:
            text = f"world_size={world_size} needs a parallel strategy, and none is installed; pip install meshwright-parallel"
            raise UsageError(text)
        example = Batch.of(batch)
        check_signature(model, example)
        if request.global_batch_size not in (None, example.size):
            example = scaled(example, request.global_batch_size)
        cluster = cluster_of(request.cluster, host, world_size).running(world_size)
        axes = [axis for axis, strategy in strategies.items() if strategy.placement_search]
        given = request.given()
        if isinstance(request.cluster, str) and request.cluster.endswith(".json"):
            # plans move between machines, so they name the cluster and not its file
            given["cluster"] = cluster.name
        allowed, margin = request.limit_bytes, MARGIN
        if allowed is None:
            # the cluster's margin for fragmentation also covers errors of predictions
            allowed, margin = cluster.usable_bytes, max(0.0, MARGIN - cluster.fragmentation)
        return Setting(
            model=model,
            batch=example,
            cluster=cluster,
            strategies=strategies,
            optimizer=request.optimizer,
            pins=self.pins(request, strategies, world_size),
            world_size=world_size,
            limit=kept_back(allowed, margin),
            allowed=allowed,
            stored=marked(model, axes) if request.keep_user_sharding else {},
            options=request.options,
            stage=request.zero or 0,
            unit=request.zero_unit,
            precision=request.precision,
            recompute=request.recompute,
            compiled=None if request.compile == AUTO else compile_rules(model, request.compile),
            rng="fast" if request.rng == "fast" else "exact",
            sequence_parallel=request.sequence_parallel,
            time_budget=request.time_budget,
            cost_model=cost_model_of(request.cost_model, cluster, host),
            request=given,
        )


def installed(host: PluginHost) -> dict[str, Strategy]:
    """axis -> strategy, outermost axis first. An axis with two strategies goes to the first by name."""
    loaded: dict[str, Strategy] = {}
    for registered in host.strategies().values():
        strategy = registered.load()
        strategy = strategy() if isinstance(strategy, type) else strategy
        for field in ("name", "axis"):
            record_value, class_value = getattr(registered.record, field), getattr(strategy, field)
            if record_value != class_value:
                raise PluginError(
                    f"strategy {registered.name!r} of {registered.distribution} is registered with {field} {record_value!r}, "
                    f"but its class has {field} = {class_value!r}; make them the same"
                )
        loaded.setdefault(strategy.axis, strategy)
    return dict(sorted(loaded.items(), key=lambda item: (item[1].order, item[0])))


def running_ranks() -> int:
    """The number of ranks of the running job, from torch.distributed or the environment of torchrun; else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def default_rules() -> RuleBook:
    """The sharding rules, those of plugins included."""
    return RuleBook.default()
