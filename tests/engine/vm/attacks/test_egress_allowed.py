from tests.egress.test_allowed import *  # noqa: F403
