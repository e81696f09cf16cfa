from tests.engine.test_disk import (
    test_a_disk_too_small_for_the_image_is_an_engine_error,
    test_a_full_disk_is_an_error_inside_and_bounded_outside,
    test_a_removed_file_that_is_held_open_still_counts,
    test_a_sparse_file_costs_nothing,
    test_df_inside_says_what_was_asked_for,
    test_inodes_are_limited,
    test_one_sandboxs_full_disk_is_not_anothers,
    test_root_finds_no_unlimited_place,
)

__all__ = [
    "test_a_disk_too_small_for_the_image_is_an_engine_error",
    "test_a_full_disk_is_an_error_inside_and_bounded_outside",
    "test_a_removed_file_that_is_held_open_still_counts",
    "test_a_sparse_file_costs_nothing",
    "test_df_inside_says_what_was_asked_for",
    "test_inodes_are_limited",
    "test_one_sandboxs_full_disk_is_not_anothers",
    "test_root_finds_no_unlimited_place",
]
