"""The picture of a run: both loss curves, and their difference on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path

from meshwright.demo.train import Outcome
from meshwright_dtensor.utils.names import count_of


def draw(outcome: Outcome, path: Path) -> None:
    """Write a PNG to `path`, creating its folder."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [step.step + 1 for step in outcome.steps]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    upper.plot(steps, [step.single for step in outcome.steps], linewidth=4, color="0.75", label="one device")
    upper.plot(
        steps, [step.parallel for step in outcome.steps], linewidth=1.2, label=f"parallel ({outcome.layout})"
    )
    upper.set_ylabel("loss")
    upper.set_title(
        f"{outcome.model}, {outcome.parameters / 1e6:.1f}M parameters, {count_of(outcome.world_size, 'rank')}"
    )
    upper.legend()
    # a difference of zero has no logarithm
    floor = 1e-8
    lower.semilogy(steps, [max(step.difference, floor) for step in outcome.steps], ".-", linewidth=0.8)
    allowed = outcome.tolerance
    lower.axhline(allowed, color="tab:red", linewidth=0.8, linestyle="--", label=f"allowed: {allowed:g}")
    lower.set_ylabel("|difference|")
    lower.set_xlabel("step")
    lower.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
