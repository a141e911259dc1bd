"""The plans that `python -m integration_tests.elastic.topology` runs on two hosts."""

from __future__ import annotations

import meshwright as mw

from .topology import built, clusters


def test_a_plan_that_knows_the_link_between_hosts_is_another_one() -> None:
    plans = {
        name: mw.plan(*built(), world_size=4, cluster=cluster) for name, cluster in clusters(100).items()
    }
    degrees = {name: {axis: n for axis, n in plan.degrees.items() if n > 1} for name, plan in plans.items()}
    # activations between two stages are less than the gradients of all parameters
    assert degrees == {"two hosts": {"pp": 2, "dp": 2}, "one host": {"zero": 4}}
