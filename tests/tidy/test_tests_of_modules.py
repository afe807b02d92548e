"""Each module has its tests where a reader looks: in the folder of tests/unit/ that mirrors its own, or in the table here."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tidy.tree import FILES, ROOT, Source, imports_of, source_of

# folder -> test file under tests/ -> the modules of the folder that it tests
ELSEWHERE: dict[str, dict[str, str]] = {
    "admin": {
        "integration/clients/test_admin.py": "calls client",
        "integration/writing/test_written_tasks.py": "publications",
        "integration/groups/test_policies.py": "groups",
        "integration/brokers/test_scheduled_ends.py": "scheduled",
        "integration/retention/test_holds.py": "holds",
        "integration/hosts/test_members.py": "members",
    },
    "broker/access": {
        "integration/access/test_access.py": "guarding",
        "integration/access/test_audit.py": "audit_sending",
    },
    "cli/commands/access": {
        "integration/access/test_audit.py": "audit quota running",
        "integration/access/test_access.py": "app",
    },
    "metaserver/access": {
        "integration/access/test_access.py": "book_rows off targets",
        "integration/access/test_audit.py": "audit_log",
        "integration/access/test_quotas.py": "quota_rows",
    },
    "protocol/access": {
        "unit/broker/access/test_judge.py": "capability",
        "unit/rpc/access/test_pacing.py": "quota",
        "unit/rpc/access/test_peers.py": "principals",
    },
    "rpc/access": {
        "integration/access/test_access.py": "credentials",
        "integration/access/test_audit.py": "audit_detail",
        "integration/access/test_quotas.py": "throttling",
        "unit/rpc/test_told_versions.py": "greeting",
        "unit/broker/access/test_judge.py": "signing",
        "unit/metaserver/access/test_issuer.py": "issuer_settings key_set",
    },
    "broker": {
        "unit/broker/test_service.py": "answering/request_checks",
        "integration/brokers/test_broker_process.py": "app control",
        "integration/brokers/test_copied_folder.py": "standing",
    },
    "broker/offline": {"acceptance/test_broker_commands.py": "inspection"},
    "broker/partition": {
        "unit/broker/test_service.py": "facts",
    },
    "broker/scheduled": {"unit/broker/scheduled/test_scheduler.py": "journal_writer subjects"},
    "broker/storage": {
        "unit/broker/store/test_quick_sync.py": "kernel_syncs",
        "crash/test_kill_points.py": "fail_points",
        "integration/brokers/test_broker_files.py": "append_file identity",
        "unit/broker/retention/test_loop_order.py": "reserve",
    },
    "broker/storage/index": {
        "integration/brokers/test_broker_indexes.py": "kinds",
        "property/broker/test_storage_index_model.py": "file_queue file_units",
    },
    "broker/storage/log": {
        "property/broker/test_storage_recovery.py": "trail",
        "unit/broker/store/test_carry_over.py": "headers",
    },
    "broker/store": {
        "property/broker/test_crash_points.py": "opening",
        "unit/broker/retention/test_loop_order.py": "dispatch",
    },
    "checker": {"unit/checker/test_judge.py": "log ownership routes"},
    "cli": {"unit/cli/commands/test_consume.py": "connection"},
    "cli/commands": {
        "acceptance/test_cli.py": "dev",
        "acceptance/test_wait.py": "wait",
        "integration/metaserver/test_deletions.py": "deletion",
        "integration/operations/test_reshape_cli.py": "operations",
        "integration/hosts/test_operating.py": "programs",
    },
    "cli/commands/broker": {
        "acceptance/test_broker_commands.py": "app folder groups",
        "integration/brokers/test_broker_indexes.py": "index",
    },
    "cli/commands/cluster": {
        "unit/rpc/tls/test_contexts.py": "certificates",
        "integration/hosts/test_tls_cluster.py": "app check init",
        "integration/hosts/test_members.py": "versions",
    },
    "cli/commands/group": {
        "acceptance/test_cli.py": "app",
    },
    "cli/commands/meta": {
        "integration/rebuild/test_meta_rebuild.py": "app database verify",
        "integration/metaserver/test_backup.py": "backup",
    },
    "cli/commands/outbox": {"integration/outbox/test_outbox.py": "app"},
    "cli/commands/parked": {
        "integration/clients/test_parked.py": "app",
        "integration/parking/test_edited_messages.py": "dead editor",
    },
    "cli/commands/scheduled": {"integration/brokers/test_scheduled_ends.py": "app messages"},
    "cli/commands/queue": {"integration/operations/test_logic_queues.py": "app read"},
    "cli/commands/spark": {"spark/test_reprocess_command.py": "app"},
    "spark/reprocess": {
        "spark/test_reprocess.py": "folder holding run worker",
        "integration/writing/test_reprocess_to_subject.py": "target",
        "integration/writing/test_killed_drivers.py": "rows_stored",
        "integration/writing/test_compared_outputs.py": "outputs",
    },
    "cli/commands/subject": {
        "acceptance/test_cli.py": "app describe",
        "integration/writing/test_publish_cli.py": "publish",
        "integration/writing/test_cut_over.py": "cut_over",
    },
    "cli/demo": {
        "acceptance/test_demo.py": "cluster consumer log processes run spark_job story",
    },
    "arrow": {
        "unit/arrow/test_json_values.py": "json_schema",
        "unit/arrow/test_rows.py": "columns",
        "unit/arrow/test_planner.py": "loss",
        "unit/spark/test_source.py": "snapshot task_reader",
    },
    "consumer": {
        "integration/consumers/test_consumer.py": "client",
        "spark/test_reprocess.py": "manifest_file",
        "integration/consumers/test_control.py": "owned",
        "integration/consumers/test_taking_many.py": "taking",
        "integration/reading/test_broadcast.py": "broadcast",
    },
    "consumer/handling": {
        "unit/consumer/handling/test_arrow_stream.py": "arrow_batch",
    },
    "consumer/delivery": {
        "integration/consumers/test_consumer.py": "decode",
        "unit/consumer/handling/test_arrow_stream.py": "pulled_batch",
    },
    "consumer/parking": {
        "integration/parking/test_parked_keys.py": "context park_sender setting_aside",
        "integration/parking/test_retries.py": "retrying",
    },
    "consumer/pulling": {
        "unit/consumer/pulling/test_pull_client.py": "pull_owner pull_views",
        "unit/consumer/test_rebalance.py": "pull_gate",
        "integration/consumers/test_shared_groups.py": "shared_client",
    },
    "consumer/reading": {
        "integration/operations/test_logic_queues.py": "queue_reader",
        "integration/reading/test_reader.py": "read_messages",
    },
    "metaserver": {
        "integration/metaserver/test_metaserver_calls.py": "calls running services",
        "integration/hosts/test_operating.py": "metrics",
    },
    "metaserver/catalogue": {
        "integration/brokers/test_accepted_copy.py": "accepted",
    },
    "metaserver/backup": {"integration/metaserver/test_backup.py": "file rows service"},
    "metaserver/cluster": {
        "integration/metaserver/test_metaserver_database.py": "partitions",
        "integration/rebuild/test_rebuild_waits.py": "lost_database",
        "unit/metaserver/removals/test_deletions.py": "removals",
        "unit/metaserver/verify/test_checks.py": "rows",
    },
    "metaserver/groups": {
        "unit/metaserver/starts/test_rows.py": "creation",
        "integration/metaserver/test_metaserver_calls.py": "service",
        "property/metaserver/test_leases_machine.py": "locked_group",
    },
    "metaserver/operations": {
        "unit/metaserver/cluster/test_losses.py": "plan_inputs",
    },
    "metaserver/publications": {
        "integration/writing/test_written_tasks.py": "service",
        "unit/metaserver/publications/test_publishing.py": "lineage",
    },
    "spark/writing": {
        "integration/writing/test_written_tasks.py": "hidden task",
        "spark/test_writing_local.py": "batch_writer running",
    },
    "metaserver/rebuild": {
        "integration/rebuild/test_meta_rebuild.py": "service",
        "unit/metaserver/rebuild/test_plan.py": "operations",
    },
    "metaserver/removals": {"integration/metaserver/test_deletions.py": "service"},
    "metaserver/resets": {
        "integration/resets/test_group_reset.py": "broker_offsets",
    },
    "metaserver/retention": {
        "integration/retention/test_deaf_brokers.py": "announcer",
        "integration/writing/test_killed_drivers.py": "hidden_expirer",
    },
    "metaserver/sql": {
        "integration/access/test_quotas.py": "name_limits",
        "integration/metaserver/test_metaserver_database.py": "dialect",
        "integration/metaserver/test_metaserver_group_write.py": "group_write",
        "integration/metaserver/test_metaserver_postgres.py": "postgres",
        "integration/metaserver/test_unwritable_database.py": "write_watch",
        "unit/metaserver/operations/test_idle_operations.py": "clock_restart",
        "unit/metaserver/retention/test_past_expirer.py": "past",
        "unit/metaserver/resets/test_rows.py": "duties",
    },
    "metaserver/verify": {
        "integration/brokers/test_copied_folder.py": "service",
        "integration/metaserver/test_metaserver_database.py": "reader",
    },
    "outbox": {
        "integration/outbox/test_lost_partitions.py": "partition_sender",
        "integration/outbox/test_outbox.py": ("admin client commits database waiters"),
    },
    "producer": {
        "integration/clients/test_producer.py": "client",
        "unit/producer/test_time_outs.py": "halts",
    },
    "producer/tables": {"integration/clients/test_send_arrow.py": "column_batch"},
    "producer/trying": {"unit/producer/test_waiting_keys.py": "loss tries"},
    "protocol": {
        "integration/brokers/test_copied_folder.py": "verification",
        "integration/operations/test_reshape.py": "operations",
        "integration/resets/test_group_reset.py": "progress",
        "property/metaserver/test_queue_chains.py": "queues",
        "unit/rpc/test_settings.py": "settings",
    },
    "protocol/errors": {
        "tidy/test_error_details.py": "base",
        "unit/protocol/test_errors.py": "access consuming deletions failures groups homes outbox parked publications reading refusals reprocess scheduled sink streaming testing transport versions",
    },
    "protocol/reading": {"integration/brokers/test_broker_indexes.py": "bounds"},
    "protocol/membership": {"integration/hosts/test_members.py": "broker_views cluster_view"},
    "protocol/parked": {"unit/consumer/pulling/test_failed_tries.py": "failing"},
    "protocol/http": {
        "integration/access/test_access.py": "access",
        "integration/access/test_audit.py": "audit",
        "integration/access/test_quotas.py": "quotas",
        "unit/cli/test_message_json.py": "message_json",
        "unit/protocol/test_endpoints.py": "any_server at_once endpoint jobs openapi",
    },
    "rpc/liveness": {"unit/rpc/websocket/test_socket.py": "keepalive"},
    "rpc/operating": {
        "integration/access/test_quotas.py": "access_figures",
        "integration/hosts/test_operating.py": "probes",
        "integration/hosts/test_tls_cluster.py": "served_network",
    },
    "rpc": {
        "integration/clients/test_cut_off.py": "network",
        "unit/producer/test_identity.py": "identity",
        "unit/rpc/test_control_calls.py": "metaservers",
    },
    "sink": {
        "integration/sink/test_effects_of_two_owners.py": "rows",
        "unit/sink/test_tables.py": "admin",
    },
    "spark/streaming": {
        "integration/reading/test_spark_stream.py": "limits reader",
    },
    "sync": {
        "integration/clients/test_sync_consumer.py": "arrow_batch consumer",
        "integration/clients/test_sync_producer.py": "producer",
    },
    "testing": {
        "unit/testing/test_cluster.py": "loop real_world waiting",
    },
    "testing/machines": {
        "sim/test_simulation.py": "connection database loop machine network",
        "sim/test_judges.py": "signals",
        "property/broker/test_crash_points.py": "disk",
    },
    "spark": {
        "spark/test_ranges_local.py": "ranges",
    },
    "user_database": {
        "integration/outbox/test_tables_made_at_once.py": "transactions",
    },
}

TESTS = ROOT / "tests"
PROGRAM = re.compile(r"\bkeylane(?:\.\w+)+")
MODULES = [
    source
    for source in FILES
    if source.room not in {"", "migrations"}  # integration/metaserver/test_migrations.py runs all
    and source.path.stem not in {"__init__", "__main__"}
]


def files_of(imported: str) -> Iterator[Path]:
    """The file of a module of ours, or of the tests, with the package that it is in."""
    parts = imported.split(".")
    path = ROOT.joinpath(*parts[1:]) if parts[0] == "keylane" else TESTS.joinpath(*parts)
    for file in (path.with_suffix(".py"), path / "__init__.py", path.parent / "__init__.py"):
        if file.is_file():
            yield file


@cache
def imported_by(file: Path) -> frozenset[Path]:
    """The files of ours that a file imports: modules, packages for names of their face, programs named in a text."""
    modules = {imported.target for imported in imports_of(source_of(file))}
    for node in source_of(file).nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant):
            for program in PROGRAM.findall(str(node.value)):
                modules |= {program, f"{program}.__main__"}
    return frozenset(path for module in modules for path in files_of(module))


@cache
def reached_from(file: Path) -> frozenset[Path]:
    """The files that a test may run, as far as imports say, its fixtures' included."""
    fixtures = [folder / "conftest.py" for folder in file.parents if folder.is_relative_to(TESTS)]
    seen = {file, *(fixture for fixture in fixtures if fixture.is_file())}
    waiting = [*seen]
    while waiting:
        new = imported_by(waiting.pop()) - seen
        seen |= new
        waiting += new
    return frozenset(seen)


def mirrored(source: Source) -> bool:
    """True if a test file of the mirrored folder has the module's name, or imports the module."""
    folder = TESTS / "unit" / source.path.relative_to(ROOT).parent
    return any(
        re.fullmatch(rf"test_{source.path.stem}(_\w+)?", test.stem)
        or source.path in imported_by(test)
        for test in folder.glob("test_*.py")
    )


def named_in_table() -> set[str]:
    return {
        f"{folder}/{module}.py"
        for folder, tests in ELSEWHERE.items()
        for modules in tests.values()
        for module in modules.split()
    }


def test_module_is_tested_where_a_reader_looks():
    missing = {source.name for source in MODULES if not mirrored(source)} - named_in_table()
    assert not missing, f"write tests/unit/FOLDER/test_MODULE.py, or name the test: {missing}"


def test_table_names_only_modules_that_have_no_mirror():
    needed = {source.name for source in MODULES if not mirrored(source)}
    settled = named_in_table() - needed
    assert not settled, f"take these out of ELSEWHERE: {settled}"


def test_test_of_the_table_runs_its_module():
    """It imports the module, directly or not; or it runs the program, and says the word of the command."""
    broken = []
    for folder, tests in ELSEWHERE.items():
        for test, modules in tests.items():
            file = TESTS / test
            assert file.is_file(), test
            for module in modules.split():
                said = re.search(
                    rf"[\"'](?:{folder.rpartition('/')[2]}|{module})\b", file.read_text()
                )
                if ROOT / folder / f"{module}.py" not in reached_from(file) and not said:
                    broken.append(f"{test} does not run {folder}/{module}.py")
    assert not broken, "\n" + "\n".join(broken)
