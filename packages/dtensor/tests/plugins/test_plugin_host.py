"""The plugin host: discovery, isolation of broken plugins, duplicates, misspelt hooks, look-ups, disabling."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_distributions import install, strategy

from meshwright_dtensor.errors import PluginError
from meshwright_dtensor.plugins import (
    DISABLE,
    RECORD_TYPES,
    ClusterSpec,
    HookSpecs,
    PluginHost,
    Problem,
    StrategySpec,
    discover,
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of distributions on sys.path. What was imported from it is forgotten afterwards."""
    monkeypatch.delenv(DISABLE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def problems(host: PluginHost, distribution: str) -> list[Problem]:
    return [problem for problem in host.problems if problem.distribution == distribution]


def test_a_plugin_is_found_and_says_who_registered_it(site: Path) -> None:
    install(
        site, "acme-ring", {"ring": "acme_ring_plugin"}, {"acme_ring_plugin": strategy("acme-ring")}, "2.5"
    )
    assert "acme_ring_plugin" not in sys.modules
    host = discover()
    registered = host.strategies()["acme-ring"]
    assert (registered.distribution, registered.version, registered.entry_point) == (
        "acme-ring",
        "2.5",
        "ring",
    )
    assert registered.record == StrategySpec(
        name="acme-ring", axis="cp", target="math:sqrt", summary="for a test"
    )
    assert host.get(StrategySpec, "acme-ring") is registered
    assert registered in host.everything()
    assert problems(host, "acme-ring") == []
    assert registered.load() is math.sqrt


def test_without_the_distribution_the_record_is_not_there(site: Path) -> None:
    assert "acme-ring" not in discover().strategies()


def test_a_plugin_may_be_an_object(site: Path) -> None:
    source = """
        class Plugin:
            @hookimpl
            def meshwright_clusters(self):
                yield ClusterSpec(name="acme-object", target="acme:C")
        plugin = Plugin()
    """
    install(site, "acme-object", {"acme-object": "acme_object_plugin:plugin"}, {"acme_object_plugin": source})
    assert "acme-object" in discover().clusters()


def test_every_hook_reaches_its_table(site: Path) -> None:
    lines = []
    for hook, record_type in RECORD_TYPES.items():
        axis = "axis='tp', " if record_type is StrategySpec else ""
        lines += ["@hookimpl", f"def {hook}():"]
        lines += [f"    yield {record_type.__name__}(name='acme_all', {axis}target='a:b', summary='s')"]
    install(site, "acme-all", {"acme-all": "acme_all_plugin"}, {"acme_all_plugin": "\n".join(lines)})
    host = discover()
    tables: list[dict[str, Any]] = [
        host.strategies(),
        host.planners(),
        host.cost_models(),
        host.clusters(),
        host.schedules(),
        host.checkpoint_backends(),
        host.op_rules(),
        host.placements(),
        host.devices(),
        host.commands(),
    ]
    assert len(tables) == len(RECORD_TYPES)
    for table, record_type in zip(tables, RECORD_TYPES.values(), strict=True):
        assert type(table["acme_all"].record) is record_type


BROKEN = {
    "import": ("import acme_is_not_there_at_all", "No module named 'acme_is_not_there_at_all'"),
    "syntax": ("def broken(:\n", "SyntaxError"),
    "exit": ("raise SystemExit(3)", "SystemExit"),
    "raise": (
        "@hookimpl\ndef meshwright_strategies():\n    raise ValueError('acme is unwell')",
        "acme is unwell",
    ),
    "late": (
        "@hookimpl\ndef meshwright_strategies():\n"
        "    yield StrategySpec(name='half', axis='cp', target='a:b')\n    raise KeyError('late')",
        "'late'",
    ),
    "type": ("@hookimpl\ndef meshwright_strategies():\n    yield 'tensor'", "yielded a str"),
    "kind": (
        "@hookimpl\ndef meshwright_strategies():\n    yield ClusterSpec(name='half', target='a:b')",
        "it must yield StrategySpec",
    ),
    "none": ("@hookimpl\ndef meshwright_strategies():\n    return None", "TypeError"),
    "arguments": ("@hookimpl\ndef meshwright_strategies(config):\n    yield config", "config"),
    "wrapper": ("@hookimpl(wrapper=True)\ndef meshwright_strategies():\n    return (yield)", "wrapper"),
    "target": (
        "@hookimpl\ndef meshwright_strategies():\n    yield StrategySpec(name='x', axis='cp', target='no colon')",
        "package.module:attribute",
    ),
    "field": (
        "@hookimpl\ndef meshwright_strategies():\n    yield StrategySpec(name='x', axes='cp', target='a:b')",
        "axes",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_reported_and_never_stops_the_others(site: Path, how: str) -> None:
    source, reason = BROKEN[how]
    install(site, f"acme-broken-{how}", {f"broken-{how}": f"acme_{how}"}, {f"acme_{how}": source}, "0.7")
    # one before it and one after it in every order
    install(site, "aaa-fine", {"aaa-fine": "aaa_fine"}, {"aaa_fine": strategy("aaa-fine")})
    install(site, "zzz-fine", {"zzz-fine": "zzz_fine"}, {"zzz_fine": strategy("zzz-fine")})
    host = discover()
    assert {"aaa-fine", "zzz-fine"} <= set(host.strategies())
    assert "half" not in host.strategies()
    (problem,) = problems(host, f"acme-broken-{how}")
    assert reason in problem.reason
    text = str(problem)
    assert f"acme-broken-{how} 0.7" in text and f"{DISABLE}=broken-{how}" in text and "\n" not in text


def test_a_record_of_a_wrong_type_does_not_take_the_right_ones_with_it(site: Path) -> None:
    source = strategy("acme-right") + "    yield 7\n"
    install(site, "acme-mixed", {"acme-mixed": "acme_mixed"}, {"acme_mixed": source})
    host = discover()
    assert "acme-right" in host.strategies()
    assert len(problems(host, "acme-mixed")) == 1


def test_one_bad_signature_takes_its_plugin_out_whole(site: Path) -> None:
    source = """
        @hookimpl
        def meshwright_clusters():
            yield ClusterSpec(name="acme-with-bad", target="a:b")

        @hookimpl
        def meshwright_strategies(config):
            yield config

        @hookimpl
        def meshwright_planners():
            yield PlannerSpec(name="acme-with-bad", target="a:b")
    """
    install(site, "acme-bad", {"bad": "acme_bad"}, {"acme_bad": source})
    host = discover()
    assert "acme-with-bad" not in host.clusters() and "acme-with-bad" not in host.planners()
    assert len(problems(host, "acme-bad")) == 1


def test_one_plugin_announced_twice_counts_once(site: Path) -> None:
    points = {"first": "acme_twice", "second": "acme_twice"}
    install(site, "acme-twice", points, {"acme_twice": strategy("acme-twice")})
    host = discover()
    assert host.strategies()["acme-twice"].entry_point == "first"
    (problem,) = problems(host, "acme-twice")
    assert problem.entry_point == "second"


def test_a_distribution_without_a_name_works(site: Path) -> None:
    install(
        site, "acme-nameless", {"nameless": "acme_nameless"}, {"acme_nameless": strategy("acme-nameless")}
    )
    (site / "acme_nameless-1.0.dist-info" / "METADATA").unlink()
    assert "acme-nameless" in discover().strategies()


def test_a_record_may_be_of_a_subclass(site: Path) -> None:
    source = """
        class Special(ClusterSpec):
            pass

        @hookimpl
        def meshwright_clusters():
            yield Special(name="acme-special", target="a:b")
    """
    install(site, "acme-special", {"special": "acme_special"}, {"acme_special": source})
    assert "acme-special" in discover().clusters()


def test_unreadable_metadata_does_not_stop_other_plugins(site: Path) -> None:
    install(site, "aaa-fine", {"aaa-fine": "aaa_fine"}, {"aaa_fine": strategy("aaa-fine")})
    install(site, "acme-garbled", {}, {})
    (site / "acme_garbled-1.0.dist-info" / "entry_points.txt").write_text(
        "[meshwright]\nthis is no entry point\n"
    )
    host = discover()
    assert "aaa-fine" in host.strategies()
    assert len(problems(host, "acme-garbled")) == 1


def test_a_name_registered_twice_names_both_and_the_fix(site: Path) -> None:
    install(site, "acme-one", {"one": "acme_one"}, {"acme_one": strategy("acme-same")}, "1.1")
    install(site, "acme-two", {"two": "acme_two"}, {"acme_two": strategy("acme-same")}, "2.2")
    with pytest.raises(PluginError) as caught:
        discover()
    text = str(caught.value)
    for part in ("'acme-same'", "acme-one 1.1", "acme-two 2.2", f"{DISABLE}=one", f"{DISABLE}=two"):
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize(("turned_off", "left"), [("one", "acme-two"), ("acme_two", "acme-one")])
def test_the_fix_for_a_duplicate_works(
    site: Path, monkeypatch: pytest.MonkeyPatch, turned_off: str, left: str
) -> None:
    install(site, "acme-one", {"one": "acme_one"}, {"acme_one": strategy("acme-same")})
    install(site, "acme-two", {"two": "acme_two"}, {"acme_two": strategy("acme-same")})
    monkeypatch.setenv(DISABLE, turned_off)
    assert discover().strategies()["acme-same"].distribution == left


def test_duplicates_with_one_entry_point_name_are_named_by_distribution(site: Path) -> None:
    install(site, "acme-one", {"same": "acme_one"}, {"acme_one": strategy("acme-same")})
    install(site, "acme-two", {"same": "acme_two"}, {"acme_two": strategy("acme-same")})
    with pytest.raises(PluginError, match=f"{DISABLE}=acme-one or {DISABLE}=acme-two"):
        discover()


def test_one_name_of_two_kinds_is_no_duplicate(site: Path) -> None:
    other = "@hookimpl\ndef meshwright_clusters():\n    yield ClusterSpec(name='acme-same', target='a:b')"
    install(site, "acme-one", {"one": "acme_one"}, {"acme_one": strategy("acme-same")})
    install(site, "acme-two", {"two": "acme_two"}, {"acme_two": other})
    host = discover()
    assert host.get(StrategySpec, "acme-same").distribution == "acme-one"
    assert host.get(ClusterSpec, "acme-same").distribution == "acme-two"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@hookimpl\ndef meshwright_stratgies():\n    yield 1", "did you mean 'meshwright_strategies'"),
        ("def meshwright_cluster():\n    yield 1", "did you mean 'meshwright_clusters'"),
        ("@hookimpl\ndef meshwrigt_commands():\n    yield 1", "did you mean 'meshwright_commands'"),
        ("@hookimpl\ndef meshwright_zzz():\n    yield 1", "the hooks are meshwright_strategies"),
        ("def meshwright_commands():\n    yield 1", "put @hookimpl above it"),
    ],
)
def test_a_misspelt_hook_is_an_error(site: Path, source: str, message: str) -> None:
    install(site, "acme-misspelt", {"misspelt": "acme_misspelt"}, {"acme_misspelt": source}, "3.0")
    with pytest.raises(PluginError) as caught:
        discover()
    text = str(caught.value)
    assert (
        message in text and "acme-misspelt 3.0" in text and f"{DISABLE}=misspelt" in text and "\n" not in text
    )


def test_names_that_only_look_like_hooks_are_ignored(site: Path) -> None:
    source = """
        import meshwright_dtensor                       # a module, though its name starts like a hook's
        meshwright_version = (1, 2)

        @hookimpl(optionalhook=True)
        def meshwright_hook_of_the_future():
            yield 1

        @hookimpl(specname="meshwright_clusters")
        def my_clusters():
            yield ClusterSpec(name="acme-named", target="a:b")
    """
    install(site, "acme-lookalike", {"lookalike": "acme_lookalike"}, {"acme_lookalike": source})
    host = discover()
    assert problems(host, "acme-lookalike") == []
    assert "acme-named" in host.clusters()


@pytest.mark.parametrize("turned_off", ["quiet", "acme-quiet", "Acme_Quiet", " other-name , quiet "])
def test_a_disabled_plugin_is_never_imported(
    site: Path, monkeypatch: pytest.MonkeyPatch, turned_off: str
) -> None:
    install(site, "acme-quiet", {"quiet": "acme_quiet_plugin"}, {"acme_quiet_plugin": "raise SystemExit(9)"})
    monkeypatch.setenv(DISABLE, turned_off)
    host = discover()
    assert "acme_quiet_plugin" not in sys.modules
    assert host.disabled == ("acme-quiet:quiet",)
    assert problems(host, "acme-quiet") == []
    monkeypatch.delenv(DISABLE)
    assert len(problems(discover(), "acme-quiet")) == 1  # the control: without the variable it is imported


def test_a_disabled_name_that_nobody_has_is_reported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "acme-quiet", {"quiet": "acme_quiet_plugin"}, {"acme_quiet_plugin": strategy("acme-quiet")})
    monkeypatch.setenv(DISABLE, "acme-quite")
    host = discover()
    assert "acme-quiet" in host.strategies()
    (problem,) = problems(host, DISABLE)
    assert "did you mean 'acme-quiet'" in str(problem)


def test_a_wrong_name_says_did_you_mean(site: Path) -> None:
    install(site, "acme-ring", {"ring": "acme_ring_plugin"}, {"acme_ring_plugin": strategy("acme-ring")})
    with pytest.raises(PluginError, match="no strategy named 'acme-rign'; did you mean 'acme-ring'"):
        discover().get(StrategySpec, "acme-rign")


def test_a_missing_kind_says_what_to_install() -> None:
    with pytest.raises(PluginError, match="no strategy is installed; pip install meshwright-parallel"):
        PluginHost.build([]).get(StrategySpec, "tensor")


def test_a_missing_name_points_at_what_is_broken_or_turned_off(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "acme-bad", {"bad": "acme_bad"}, {"acme_bad": "import acme_is_not_there_at_all"})
    install(site, "acme-off", {"off": "acme_off"}, {"acme_off": strategy("acme-off")})
    monkeypatch.setenv(DISABLE, "off")
    with pytest.raises(PluginError) as caught:
        discover().get(StrategySpec, "acme-off")
    assert "acme-off:off" in str(caught.value) and "acme-bad" in str(caught.value)


def test_a_host_does_not_change_and_hosts_are_independent(site: Path) -> None:
    first = discover()
    install(site, "acme-late", {"late": "acme_late"}, {"acme_late": strategy("acme-late")})
    sys.path_importer_cache.pop(str(site), None)
    second = discover(disabled=[])
    assert "acme-late" in second.strategies() and "acme-late" not in first.strategies()
    second.strategies().clear()
    assert "acme-late" in second.strategies()


@pytest.mark.parametrize("hook", RECORD_TYPES)
def test_every_hook_is_documented_with_an_example(hook: str) -> None:
    text = getattr(HookSpecs, hook).__doc__ or ""
    assert (
        "Example::" in text and f"def {hook}():" in text and f"yield {RECORD_TYPES[hook].__name__}(" in text
    )


def test_table_of_hooks_is_complete() -> None:
    assert {name for name in vars(HookSpecs) if name.startswith("meshwright_")} == set(RECORD_TYPES)


@pytest.mark.parametrize("hook", RECORD_TYPES)
def test_the_examples_run(site: Path, hook: str) -> None:
    _, _, example = (getattr(HookSpecs, hook).__doc__ or "").partition("Example::")
    module = f"acme_example_{hook}"
    install(site, f"acme-{hook}", {hook: module}, {module: textwrap.dedent(example.strip("\n"))})
    host = discover()
    assert problems(host, f"acme-{hook}") == []
    assert [it.distribution for it in host.all(RECORD_TYPES[hook]).values()].count(f"acme-{hook}") == 1
