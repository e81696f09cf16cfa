from tests.egress.test_protocols import *  # noqa: F403
