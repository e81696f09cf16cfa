"""A run takes a part of some lists; the parts of a round are the whole, and what changed is in each of them."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.changes import Changes
from tests.shares import ROUND, Share, choose, seed, settle

PARTS = st.integers(1, 12)


@given(size=st.integers(0, 300), parts=PARTS, turn=st.integers(0, 12))
def test_the_parts_are_the_whole_and_have_nothing_twice(size: int, parts: int, turn: int) -> None:
    count = Counter(
        number for part in range(parts) for number in range(size) if Share(part, parts).has(number, turn=turn)
    )
    assert count == dict.fromkeys(range(size), 1)


@given(size=st.integers(0, 100), parts=PARTS, times=st.integers(1, ROUND), turn=st.integers(0, 12))
def test_a_greater_part_misses_nothing_either(size: int, parts: int, times: int, turn: int) -> None:
    for number in range(size):
        assert any(Share(part, parts).has(number, times=times, turn=turn) for part in range(parts))


@given(day=st.integers(0, 100_000), size=st.integers(0, 100), times=st.integers(1, ROUND))
def test_a_round_of_days_has_everything_and_each_day_its_part(day: int, size: int, times: int) -> None:
    days = [Share.of_day(one) for one in range(day, day + ROUND)]
    chosen = [[number for number in range(size) if share.has(number, times=times)] for share in days]
    assert set().union(*map(set, chosen)) == set(range(size))
    assert all(abs(len(part) - size * times / ROUND) <= times for part in chosen)


def test_two_runs_of_one_day_agree_and_a_soak_has_everything() -> None:
    one: dict[str, str] = {}
    settle(one)
    assert Share.parse(one["K8E_SHARE"]).parts == ROUND
    another: dict[str, str] = {}
    settle(another)
    assert another["K8E_SHARE"] == one["K8E_SHARE"]
    assert another["K8E_SEED"] != one["K8E_SEED"]  # the numbers are every run's own
    soak = {"K8E_SOAK": "1"}
    settle(soak)
    assert soak["K8E_SHARE"] == "1/1"
    chosen = {"K8E_SHARE": "3/4", "K8E_SEED": "7"}
    settle(chosen)
    assert (chosen["K8E_SHARE"], chosen["K8E_SEED"]) == ("3/4", "7")


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "a/b", "1/0", "-1/4", "1/4/2"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 3/4"):
        Share.parse(text)


def test_the_chosen_share_is_taken_and_what_is_always_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8E_SHARE", "3/4")
    assert choose(range(12)) == [2, 6, 10]
    assert choose(range(12), always=lambda number: number == 5) == [2, 5, 6, 10]


def test_chance_is_the_same_for_one_seed_and_differs_between_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8E_SEED", "1")
    first = seed("a")
    assert first == seed("a")
    assert first != seed("b")
    monkeypatch.setenv("K8E_SEED", "2")
    assert first != seed("a")


class Repository:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false"]
        command = ["git", *who, *words]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, content: str, name: str = "file.py") -> None:
        (self.folder / name).write_text(content)
        self.git("add", name)
        self.git("commit", "--quiet", "-m", "change")

    def changed(self, *names: str) -> list[str]:
        changes = Changes(self.folder)
        return [name for name in names if changes.touch_definition(self.folder / "file.py", name)]


OLD = "def one():\n    pass\n\n\nclass Two:\n    def three(self):\n        pass\n\n    def four(self):\n        pass\n"
NAMES = ("one", "Two.three", "Two.four")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "repository").mkdir()
    repository = Repository(tmp_path / "repository")
    repository.commit(OLD)
    return repository


def test_what_the_working_tree_changes_is_found_by_function(repository: Repository) -> None:
    repository.commit("", "other.py")
    assert repository.changed(*NAMES) == []
    path = repository.folder / "file.py"
    path.write_text(OLD.replace("    def four(self):\n        pass", "    def four(self):\n        return 1"))
    assert repository.changed(*NAMES) == ["Two.four"]
    assert repository.changed("five") == ["five"], "what is not found is new"


def test_on_a_branch_it_is_what_changed_since_it_left_main(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "branch")
    repository.commit(OLD.replace("def one():\n    pass", "def one():\n    return 1"))
    for number in range(12):
        repository.commit(str(number), "other.py")
    assert repository.changed(*NAMES) == ["one"]


def test_on_main_it_is_what_the_last_commits_changed(repository: Repository) -> None:
    repository.commit(OLD.replace("def one():\n    pass", "def one():\n    return 1"))
    for number in range(9):
        repository.commit(str(number), "other.py")
    assert repository.changed(*NAMES) == ["one"]
    for number in range(9, 12):
        repository.commit(str(number), "other.py")
    assert repository.changed(*NAMES) == []


def test_a_clone_without_history_says_so(repository: Repository, tmp_path: Path) -> None:
    repository.commit(OLD + "\n")
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.folder}", str(shallow))
    changes = Changes(shallow)
    assert not changes.touch_definition(shallow / "file.py", "one")
    assert "no history" in str(changes)
    fresh = tmp_path / "fresh"
    repository.git("clone", "--quiet", f"file://{repository.folder}", str(fresh))
    assert Changes(fresh).base == repository.git("rev-parse", "HEAD~1")


def test_a_new_file_is_new_and_a_text_is_found_by_its_lines(repository: Repository) -> None:
    (repository.folder / "new.py").write_text("WORDS = [\n    'a',\n]\n")
    changes = Changes(repository.folder)
    assert changes.touch_text(repository.folder / "new.py", "a")
    repository.commit("WORDS = [\n    'a',\n    'b',\n]\n", "new.py")
    for number in range(10):
        repository.commit(str(number), "other.py")
    (repository.folder / "new.py").write_text("WORDS = [\n    'a',\n    'b',\n    'c',\n]\n")
    changes = Changes(repository.folder)
    assert [text for text in "abc" if changes.touch_text(repository.folder / "new.py", text)] == ["c"]
