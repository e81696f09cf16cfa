"""Inspect's own checks of a sandbox provider, and a task. Run by the Python that has Inspect (test_inspect.py)."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState, solver
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec, SandboxUnavailableError, sandbox
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - 44 of them

from sandbox_client import AsyncSandboxClient

CONFIG = json.loads(os.environ["K8E_TEST_SANDBOX"])


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    """As Inspect finds and makes it."""
    provider = registry_find_sandboxenv("k8e")
    config = provider.config_deserialize(CONFIG)
    made = await provider.sample_init("checks", config, {})
    yield made["default"]
    await provider.sample_cleanup("checks", config, made, False)
    with pytest.raises(SandboxUnavailableError):
        await made["default"].exec(["true"])


@solver
def use_sandbox(fail: bool) -> object:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        result = await sandbox().exec(["sh", "-c", "cat question; id -un"])
        assert not fail, "the sample fails"
        state.output.completion = result.stdout
        return state

    return solve


@pytest.mark.parametrize("fail", [False, True])
async def test_a_task_has_a_sandbox_for_each_sample_which_goes_with_it(fail: bool) -> None:
    config = registry_find_sandboxenv("k8e").config_deserialize(CONFIG)
    samples = [Sample(input="?", target=text, files={"question": text}) for text in ("1 apple", "2 apples")]
    spec = SandboxEnvironmentSpec("k8e", config)
    task = Task(dataset=samples, solver=use_sandbox(fail), scorer=includes(), sandbox=spec)
    (log,) = await eval_async(task, model="mockllm/model", log_format="json")
    assert log.status == ("error" if fail else "success")
    if not fail:
        assert log.results.scores[0].metrics["accuracy"].value == 1.0


async def test_what_an_interruption_leaves_is_cleaned_up_by_its_id() -> None:
    provider = registry_find_sandboxenv("k8e")
    config = provider.config_deserialize(CONFIG)
    made = await provider.sample_init("interrupted", config, {})
    await provider.sample_cleanup("interrupted", config, made, True)
    mine = made["default"].session_id
    async with AsyncSandboxClient() as client:
        assert (await client.get_session(mine)).labels["inspect-ai/task"] == "interrupted"
        await provider.cli_cleanup(mine)
        assert mine not in [session.session_id for session in await client.list_sessions()]
