from tests.egress.test_neighbours import *  # noqa: F403
