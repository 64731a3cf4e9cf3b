"""Mutation testing: what is changed, and what becomes of a change, on a tree of three files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed: it comes with scripts/mutate")

from scripts.mutation import report, trying
from scripts.mutation.mutants import Mutant, mutants_of
from tests.serving import ROOT

MODULE = '''"""A module."""

LIMIT = 4096
Part = int | None


def first(numbers: list[int], *, least: int | None = None) -> int:
    assert numbers
    for number in numbers:
        if least is None or number > least:
            return number
    raise ValueError("none")
'''

TESTS = """import pytest
from package.module import first

def test_it():
    assert first([1, 2], least=1) == 2
    with pytest.raises(ValueError, match="none"):
        first([1], least=2)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "package/module.py").write_text(MODULE)
    (tmp_path / "tests/test_module.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    return tmp_path


def changes(root: Path) -> dict[tuple[str, str], Mutant]:
    found = [mutant for mutant in mutants_of(root, "package/module.py") if mutant.is_valid(root)]
    return {mutant.change(root): mutant for mutant in found}


def test_only_what_changes_behaviour_is_changed(root: Path) -> None:
    """Neither annotations, constants and assertions nor the `*` among parameters."""
    condition = "if least is None or number > least:"
    assert set(changes(root)) == {
        ("for number in numbers:", "for number in []:"),
        (condition, "if not least is None or number > least:"),
        (condition, "if least is not None or number > least:"),
        (condition, "if least is None and number > least:"),
        (condition, "if least is None or number >= least:"),
        ('raise ValueError("none")', "pass"),
    }


TRY = """
from pathlib import Path
from scripts.mutation import trying
from scripts.mutation.mutants import mutants_of
trying.PACKAGES.clear()
trying.PACKAGES["package"] = ["tests"]
root = Path({root!r})
bench = trying.Bench(root)
for mutant in mutants_of(root, "package/module.py"):
    if mutant.is_valid(root):
        print(mutant.operator, bench._try_out(mutant).outcome)
print("without", bench._run(["tests"], 60.0)[0])
print("at once", trying.run_tests(root, ["tests"], 0.0, 60.0)[0])
"""

ENDLESS = """
def half(number: int) -> int:
    count = 0
    while number >= 2 * count:
        count += 1
    return count - 1
"""

TRY_ENDLESS = """
from pathlib import Path
from scripts.mutation import trying
from scripts.mutation.mutants import mutants_of
trying.TEST_SECONDS = 12
trying.PACKAGES.clear()
trying.PACKAGES["package"] = ["tests"]
root = Path({root!r})
found = mutants_of(root, "package/endless.py")
mutant = next(each for each in found if each.line == 5 and each.change(root)[1].endswith(" 0"))
for _ in range(2):
    result = trying.Bench(root)._try_out(mutant)
    print(result.outcome, result.test)
    (root / "tests/test_endless.py").write_text({failing!r})
"""


def test_a_change_is_noticed_or_survives_and_is_undone(root: Path) -> None:
    command = [sys.executable, "-c", TRY.format(root=str(root))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    outcomes = dict(line.rsplit(" ", 1) for line in ran.stdout.splitlines())
    assert outcomes["RemoveStatement"] == outcomes["ZeroIterationForLoop"] == "killed"
    assert outcomes["ReplaceOrWithAnd"] == "killed"
    assert (outcomes["without"], outcomes["at once"]) == ("survived", "timeout")
    assert (root / "package/module.py").read_text() == MODULE


def test_only_what_passes_without_the_change_notices_it(root: Path) -> None:
    """A loop that never ends is noticed; a test that fails anyway is no proof."""
    (root / "package/endless.py").write_text(ENDLESS)
    passing = "from package.endless import half\n\ndef test_half():\n    assert half(7) == 3\n"
    (root / "tests/test_endless.py").write_text(passing)
    code = TRY_ENDLESS.format(root=str(root), failing=passing.replace("3", "4"))
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    test = "tests/test_endless.py::test_half"
    assert ran.stdout.splitlines() == [f"timeout {test}", f"unclear {test}"], ran.stderr


def test_survivors_are_listed_but_for_those_that_change_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PACKAGES", {"package": ["tests"]})
    monkeypatch.setattr(report, "package_of", lambda path: "package")
    monkeypatch.setattr(report, "EQUIVALENT", root / "equivalent.toml")
    entry = 'path = "package/module.py"\nwas = "raise ValueError(\\"none\\")"\nis = "pass"\nreason = "so"\n'
    (root / "equivalent.toml").write_text(f"[[equivalent]]\n{entry}")
    subprocess.run(["git", "init", "-q", root], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "a"], cwd=root, check=True)
    found = list(changes(root).items())
    outcomes = ["survived" if was_is[1] in ("pass", "for number in []:") else "killed" for was_is, _ in found]
    results = [
        trying.Result(mutant, outcome, 1.0) for (_, mutant), outcome in zip(found, outcomes, strict=True)
    ]
    text = report.markdown(root, results, "scripts/mutate", 6)
    assert "| package | 6 | 4 | 0 | 1 | 1 | 0 | 80.0% |" in text
    assert "package/module.py:9\n\n```diff\n-for number in numbers:\n+for number in []:\n```" in text
    assert "+pass" not in text
