"""Mutants that few seeds show, each with a test that fails with it."""

from __future__ import annotations

COPIES = "unit/broker/copies"
CAUGHT_BY = {
    "copies_join_beside_a_commit_that_has_ended": "unit/broker/store/test_group_commit.py::"
    "test_commit_that_copies_have_is_decided_before_it_is_durable",
    "copies_say_what_they_are_about_to_store": f"{COPIES}/test_follower.py::"
    "test_follower_asks_ahead_while_it_stores_when_its_broker_has_more",
    "replaced_folders_keep_their_snapshots": f"{COPIES}/test_follower.py::"
    "test_folder_of_a_replaced_broker_becomes_a_copy_of_the_one_in_its_place",
    "copies_remove_segments_at_once": f"{COPIES}/test_follower.py::"
    "test_copy_keeps_a_segment_until_it_has_what_the_broker_repeated_of_it",
    "copies_remove_segments_that_a_cut_needs": f"{COPIES}/test_follower.py::"
    "test_copy_keeps_a_segment_until_it_has_what_the_broker_repeated_of_it",
    "cut_copies_keep_their_trail": f"{COPIES}/test_copied_log.py::"
    "test_copied_log_has_lost_nothing_when_it_was_cut",
    "reports_count_before_a_comparison": f"{COPIES}/test_follower.py::"
    "test_copy_counts_only_once_its_log_was_compared",
    "refused_folders_are_read_to_their_end": f"{COPIES}/test_first_answers.py::"
    "test_reader_gets_nothing_of_a_commit_that_no_copy_had",
    "segments_of_a_commit_begin_with_the_barrier": "unit/broker/storage/log/test_commit_log.py::"
    "test_records_follow_each_other_and_segments_join",
    "sets_are_changed_from_any_version": "unit/metaserver/cluster/test_copy_sets.py::"
    "test_set_is_changed_only_from_the_version_that_its_broker_knows",
    "two_folders_count_as_one": f"{COPIES}/test_follower.py::"
    "test_folder_that_was_copied_from_that_of_another_follower_gets_another_id",
    "each_start_gives_time_back_in_full": "unit/metaserver/sql/test_clock_restart.py::"
    "test_dead_session_ends_though_a_metaserver_is_started_again_and_again",
    "promises_revive_leases": "unit/consumer/session/test_promises.py::"
    "test_promise_does_not_revive_a_lease_that_has_ended",
    "starts_forget_promises": "unit/broker/test_promises.py::"
    "test_promise_is_durable_before_it_is_told",
    "waiting_tokens_end_no_promise": "unit/broker/test_promises.py::"
    "test_waiting_token_ends_the_promise",
    "restarted_brokers_call_their_log_durable": f"{COPIES}/test_set_keeper.py::"
    "test_clients_wait_after_a_restart_until_copies_have_the_log",
    "unanswered_proposals_are_forgotten": f"{COPIES}/test_set_keeper.py::"
    "test_copy_counts_while_it_is_not_known_whether_it_has_joined",
    "brokers_store_on_while_they_hand_over": f"{COPIES}/test_hand_over.py::"
    "test_copy_is_told_once_the_broker_stores_nothing_more",
    "what_waits_is_acked_when_the_place_is_taken": f"{COPIES}/test_hand_over.py::"
    "test_copy_is_told_once_the_broker_stores_nothing_more",
    "offers_do_not_end": "unit/metaserver/cluster/test_copy_sets.py::"
    "test_offer_ends_when_it_is_withdrawn_or_its_time_is_over",
    "loose_messages_are_released_by_range": "unit/broker/test_parking_of_parents.py::"
    "test_displaced_key_passes_with_the_loose_messages_and_is_released_with_them",
}
