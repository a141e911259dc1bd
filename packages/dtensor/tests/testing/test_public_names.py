"""A change of public names fails, and says what changed, which version to raise and how to write the file again."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright_dtensor.testing.public_names import check_public_names, public_names

MODULES = ("meshwright_dtensor.plugins", "meshwright_dtensor.schedule")
HOOK = "hook meshwright_schedules(self) -> 'Iterable[specs.ScheduleSpec]'"
METHOD = "meshwright_dtensor.schedule.Schedule.owner(self, stage: 'int', shape: 'Shape') -> 'int'"


@pytest.mark.parametrize(
    ("line", "instead", "rule"),
    [
        (HOOK, [], "names are new: hook API 1.2"),
        (METHOD, [METHOD.replace("stage: 'int', ", "")], "have changed or are gone: hook API 2.0"),
        (
            "hook API 1.1",
            ["hook API 1.1", "meshwright_dtensor.plugins.Gone"],
            "have changed or are gone: hook API 2.0",
        ),
    ],
    ids=["new", "changed", "gone"],
)
def test_a_change_says_what_to_do(tmp_path: Path, line: str, instead: list[str], rule: str) -> None:
    file = tmp_path / "public_names.txt"
    lines = public_names(MODULES)
    file.write_text("\n".join(lines) + "\n")
    check_public_names(file, MODULES)
    place = lines.index(line)
    lines[place : place + 1] = instead
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(AssertionError) as raised:
        check_public_names(file, MODULES)
    text = str(raised.value)
    assert rule in text and f"public_names {' '.join(MODULES)} > {file}" in text
    assert (f"  + {line}" in text) == (line not in instead)
