import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio only: it is what the daemon runs on."""
    return "asyncio"
