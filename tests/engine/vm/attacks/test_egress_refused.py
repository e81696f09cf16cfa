from tests.egress.test_refused import *  # noqa: F403
