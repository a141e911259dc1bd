"""A plan as one HTML page that needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files

import jinja2

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_planner.reports.drawings import mesh_drawing, timeline
from meshwright_planner.reports.plan_view import COLOURS, memory_limit, optimality, view_of


def page(plan: ParallelPlan, *, cluster: Cluster | None = None, host: PluginHost | None = None) -> str:
    """One HTML page of a plan: parts of time and memory, mesh, timeline, model tree with placements. It loads no other file.

    Args:
        cluster: the cluster that the plan runs on; None leaves out the timeline and upgrades.
        host: where schedules are found; None discovers what is installed.
    """
    view = view_of(plan, None if cluster is None else cluster.running(plan.world_size), host)
    limit = memory_limit(plan, cluster)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(seconds=human_seconds, bytes=human_bytes)
    source = files("meshwright_planner.reports").joinpath("page.html.j2").read_text("utf-8")
    replayed = timeline(plan, cluster, host)
    return environment.from_string(source).render(
        plan=plan,
        view=view,
        good=None if plan.predicted is None or plan.predicted.proof is None else optimality(plan.predicted),
        step=view.step_parts(),
        step_size=sum(view.seconds.values()) or 1.0,
        memory=view.memory_parts(),
        memory_size=max(sum(view.memory.values()), limit) or 1,
        limit=limit,
        mesh=mesh_drawing(plan, [] if cluster is None else cluster.nodes(plan.world_size)),
        tree=tree_of(plan),
        **vars(replayed),
        colours=COLOURS,
        collectives=sorted(plan.collectives, key=lambda c: -c.count * c.nbytes),
    )


@dataclass
class Branch:
    """A module pattern with its rules, and the patterns inside it.

    Args:
        name: last part of the pattern.
        notes: (kind, text): "placement" of a parameter, "call" with its target states, "recompute", "experts".
        inside: last part -> pattern inside this one.
    """

    name: str
    notes: list[tuple[str, str]] = field(default_factory=list)
    inside: dict[str, Branch] = field(default_factory=dict)

    def at(self, pattern: str) -> Branch:
        """The branch of a dotted pattern, created if missing."""
        here = self
        for part in pattern.split(".") if pattern else ():
            here = here.inside.setdefault(part, Branch(part))
        return here


def tree_of(plan: ParallelPlan) -> Branch:
    """The rules of a plan as a tree of module name patterns."""
    root = Branch("model")
    for parameter in plan.parameters:
        states = ", ".join(f"{axis} {s}" for axis, s in parameter.placement.items() if s != "I")
        root.at(parameter.pattern).notes.append(("placement", states or "replicated"))
    for call in plan.activations:
        inputs, outputs = ("; ".join(map(_states, states or ())) for states in (call.inputs, call.outputs))
        gives = f" gives {outputs}" if outputs else ""
        text = f"{call.function} #{call.occurrence}: {inputs or 'any'}{gives}"
        root.at(call.module).notes.append(("call", text))
    for rule in plan.recompute:
        root.at(rule.pattern).notes.append(("recompute", f"recomputed in the backward pass ({rule.policy})"))
    for experts in plan.experts:
        text = f"{experts.count} experts, {experts.count // plan.degree('ep')} a rank"
        root.at(experts.module).notes.append(("experts", text))
    return root


def _states(states: object) -> str:
    named = states.items() if isinstance(states, dict) else ()
    return ", ".join(f"{axis} {state}" for axis, state in named) or "any"
