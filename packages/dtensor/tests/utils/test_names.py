"""Names and counts in messages."""

from __future__ import annotations

import pytest

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.utils.names import count_of


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "rank", "1 rank"),
        (2, "rank", "2 ranks"),
        (0, "row", "0 rows"),
        (3, "microbatch", "3 microbatches"),
    ],
)
def test_count_of_uses_the_plural_unless_one(number: int, noun: str, text: str) -> None:
    assert count_of(number, noun) == text


def test_a_file_that_is_no_plan_is_named_with_its_text(tmp_path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# meshwright\n")
    with pytest.raises(PlanError) as caught:
        ParallelPlan.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is not a plan file: expected JSON at line 1 column 1")
    assert message.endswith("found '# meshwright\\n'")
    with pytest.raises(PlanError, match=r"absent.json is not a plan file: it cannot be read \(No such file"):
        ParallelPlan.load(tmp_path / "absent.json")
