from tests.engine.test_resources import *  # noqa: F403
