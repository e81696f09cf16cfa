"""A name server that gives one answer to the check and another to the connection achieves nothing: the address that was
judged is the one that is connected to, for the registry, where it redirects to, and where it has tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.images.rebinding import GOOD

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    words = ["unshare", "-n", "-m", sys.executable, "-m", "tests.images.rebinding", str(tmp_path_factory.mktemp("m"))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_registry_is_asked_under_its_name(told: Any) -> None:
    assert told["steady"] == {"outcome": ["ok", "ok"], "visits": [GOOD], "asked": 2}, "once for each connection"


@pytest.mark.parametrize("case", ["metadata", "loopback"])
def test_what_was_judged_is_what_is_connected_to(told: Any, case: str) -> None:
    """The first connection goes where the only answer led; the second one is judged anew, and refused."""
    assert told[case] == {"outcome": ["ok", "refused"], "visits": [GOOD], "asked": 2}


def test_one_bad_address_among_good_ones_is_enough(told: Any) -> None:
    assert told["both"] == {"outcome": ["refused", "refused"], "visits": [], "asked": 2}


def test_where_it_redirects_to(told: Any) -> None:
    assert told["redirect"] == {"outcome": ["ok", "refused"], "visits": [GOOD], "asked": 4}


def test_where_it_has_tokens(told: Any) -> None:
    """One token for both questions: its name is asked for once, and led to one place."""
    assert told["token"]["outcome"] == ["ok", "ok"]
    assert told["token"]["visits"] == [GOOD]


def test_a_proxy_knows_names_itself(told: Any) -> None:
    assert told["proxy"]["outcome"] == ["ok", "ok"]
    assert told["proxy"]["visits"] == [GOOD, "proxy"]
