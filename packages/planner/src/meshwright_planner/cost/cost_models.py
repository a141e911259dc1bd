"""Cost models by name: roofline, measured, and checks of registered ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

from meshwright_dtensor.cluster import Cluster, CollectiveKind, Communication, CostModel, Link, Operation
from meshwright_dtensor.errors import MeshwrightError, PluginError, UsageError
from meshwright_dtensor.plugins import CostModelSpec, PluginHost
from meshwright_planner.cost.operations import timed


class Roofline:
    """Datasheet figures only: peak rates with the cluster's efficiencies, alpha-beta for collectives; no measured curves."""

    def __init__(self, cluster: Cluster) -> None:
        self.figures = replace(cluster, work=(), collectives=())

    def operation(self, operation: Operation) -> float:
        """See CostModel."""
        return timed(self.figures, operation)[0]

    def collective(self, communication: Communication) -> float:
        """See CostModel."""
        kind, nbytes, degree, _, link = communication
        return min(link.algorithms(kind, nbytes, degree).values())


class Measured:
    """The curves of `meshwright calibrate`, else as without a cost model. Raises UsageError: the cluster is not calibrated."""

    def __init__(self, cluster: Cluster) -> None:
        missing = [] if cluster.work else ["operations"]
        missing += ["collectives"] if cluster.ranks > 1 and not cluster.collectives else []
        if missing:
            raise UsageError(
                f"cost_model='measured': no {' and no '.join(missing)} of cluster {cluster.name!r} were measured; give the "
                "file that `meshwright calibrate -o machine.json` writes there as cluster, or leave cost_model out"
            )
        self.figures = cluster

    def operation(self, operation: Operation) -> float:
        """See CostModel."""
        return timed(self.figures, operation)[0]

    def collective(self, communication: Communication) -> float:
        """See CostModel."""
        kind, nbytes, degree, _, link = communication
        return link.seconds(kind, nbytes, degree)


class CheckedModel:
    """A registered cost model with its answers cached and checked.

    Args:
        name, distribution: of its record, for errors.
        model: the model for the cluster.

    Attributes:
        figures: the cluster whose figures a first-party model uses; None for other models.
    """

    def __init__(self, name: str, distribution: str, model: CostModel) -> None:
        self.name, self.distribution = name, distribution
        self._model = model
        # a subclass may return other times than the inherited figures give
        first_party = type(model) in (Roofline, Measured)
        self.figures: Cluster | None = getattr(model, "figures", None) if first_party else None
        self._seconds: dict[Operation | Communication, float] = {}

    def operation(self, operation: Operation) -> float:
        """See CostModel. Raises PluginError: the model fails, or its answer is no time."""
        return self._checked(self._model.operation, operation)

    def collective(self, communication: Communication) -> float:
        """See CostModel. Raises PluginError: as of `operation`."""
        return self._checked(self._model.collective, communication)

    def _checked(self, ask: Callable[[Any], Any], question: Operation | Communication) -> float:
        if question in self._seconds:
            return self._seconds[question]
        try:
            answer = ask(question)
        except MeshwrightError:
            raise
        except Exception as error:
            # third-party code may raise anything
            raise self._error(f"raised {type(error).__name__}: {error}", question) from error
        if isinstance(answer, bool) or not isinstance(answer, Real):
            shown = repr(answer)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise self._error(f"returned {shown}, a {type(answer).__name__}", question)
        seconds = float(answer)
        if not math.isfinite(seconds) or seconds < 0:
            raise self._error(f"returned {seconds!r}", question)
        self._seconds[question] = seconds
        return seconds

    def _error(self, what: str, question: Operation | Communication) -> PluginError:
        shown = ", ".join(f"{n}={v!r}" for n, v in question._asdict().items() if n != "link")
        return PluginError(
            f"cost model {self.name!r} of {self.distribution} {what} for {type(question).__name__}({shown}); it must return "
            "seconds, one finite number of 0 or more: upgrade it, or leave cost_model out"
        )


@dataclass(frozen=True)
class PricedLink(Link):
    """A link along the mesh axis `axis` whose collectives `model` times; `plain`: the link of the cluster."""

    plain: Link | None = None
    axis: str = ""
    model: CheckedModel | None = None

    def seconds(self, kind: CollectiveKind, nbytes: float, degree: int) -> float:
        """See Link."""
        if degree <= 1 or self.plain is None or self.model is None:
            return super().seconds(kind, nbytes, degree)
        return self.model.collective(Communication(kind, nbytes, degree, self.axis, self.plain))


def priced(link: Link, axis: str, model: CheckedModel | None) -> Link:
    """The link with its collectives timed by `model`; unchanged without a model."""
    if model is None:
        return link
    link_fields = {field.name: getattr(link, field.name) for field in fields(Link)}
    return PricedLink(**link_fields, plain=link, axis=axis, model=model)


def cost_model_of(name: str | None, cluster: Cluster, host: PluginHost) -> CheckedModel | None:
    """The registered cost model of that name for a cluster; None for None: the cluster's own figures.

    Raises:
        PluginError: no cost model has that name, or it cannot be made for this cluster.
        UsageError: the cluster lacks measurements.
    """
    if name is None:
        return None
    record = host.get(CostModelSpec, name)
    target = record.load()
    who = f"cost model {name!r} of {record.distribution}"
    try:
        model = target(cluster)
    except MeshwrightError:
        raise
    except Exception as error:
        raise PluginError(
            f"{who} cannot be made for cluster {cluster.name!r}: {type(error).__name__}: {error}; upgrade it, or leave "
            "cost_model out"
        ) from error
    lacking = [part for part in ("operation", "collective") if not callable(getattr(model, part, None))]
    if lacking:
        raise PluginError(
            f"{who} makes a {type(model).__name__} without {' and '.join(lacking)}; its target must take a Cluster and return a "
            "meshwright_dtensor.cluster.CostModel"
        )
    return CheckedModel(name, record.distribution, model)
