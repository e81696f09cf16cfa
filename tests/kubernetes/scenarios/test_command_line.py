"""The scenarios of the command line, as they are for one machine (tests/scenarios), at a gateway whose sandboxes are
pods.

Not here: what the image of these tests lacks (node, `uniq`, a name for user 1000), root in a sandbox (refused), the
machine's own tools, and what is about the daemon's files on its machine (bombs, damage, trouble).
"""

from tests.scenarios.test_files import (
    test_as_the_document_has_it,
    test_bytes_and_modes_and_appending,
    test_names_that_shells_trip_over,
    test_ways_out_lead_nowhere,
    test_what_changed_since,
)
from tests.scenarios.test_modes import (
    test_a_manifest_is_all_there_or_nothing_is,
    test_auto,
    test_by_hand,
    test_tenants,
    test_two_shells_at_the_same_moment_share_one_session,
)
from tests.scenarios.test_quick import (
    test_a_program_that_fails_says_why,
    test_bytes_go_in_and_come_out_as_they_are,
    test_hello,
    test_huge_output_is_whole_with_raw_and_bounded_with_counts_without,
    test_many_lines_in_quotes,
    test_nothing_of_the_machine_is_to_be_seen,
    test_output_that_is_no_text_is_still_one_json_object,
    test_the_exit_code_is_the_commands,
    test_the_same_session_is_used_again_and_nothing_has_to_be_managed,
)
from tests.scenarios.test_subagents import (
    test_a_child_has_nothing_of_its_parent_but_the_workspace,
    test_a_child_that_asks_for_more_is_refused,
    test_a_child_that_only_looks_sees_what_is_written_meanwhile,
    test_parallel_sub_agents,
    test_the_family_outlives_the_daemon_and_ends_together,
)

__all__ = [
    "test_a_child_has_nothing_of_its_parent_but_the_workspace",
    "test_a_child_that_asks_for_more_is_refused",
    "test_a_child_that_only_looks_sees_what_is_written_meanwhile",
    "test_a_manifest_is_all_there_or_nothing_is",
    "test_a_program_that_fails_says_why",
    "test_as_the_document_has_it",
    "test_auto",
    "test_by_hand",
    "test_bytes_and_modes_and_appending",
    "test_bytes_go_in_and_come_out_as_they_are",
    "test_hello",
    "test_huge_output_is_whole_with_raw_and_bounded_with_counts_without",
    "test_many_lines_in_quotes",
    "test_names_that_shells_trip_over",
    "test_nothing_of_the_machine_is_to_be_seen",
    "test_output_that_is_no_text_is_still_one_json_object",
    "test_parallel_sub_agents",
    "test_tenants",
    "test_the_exit_code_is_the_commands",
    "test_the_family_outlives_the_daemon_and_ends_together",
    "test_the_same_session_is_used_again_and_nothing_has_to_be_managed",
    "test_two_shells_at_the_same_moment_share_one_session",
    "test_ways_out_lead_nowhere",
    "test_what_changed_since",
]
