from tests.egress.test_changes import *  # noqa: F403
