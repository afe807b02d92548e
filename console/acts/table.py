"""All acts of the console, by name: form, command, call, and what is typed before it destroys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..page import href
from ..shown import key_texts
from . import access, groups, operations, parked, subjects
from .act import Act, Field, Values, command_text, group_page, subject_page


def _page(*parts: str) -> Callable[[Values], str]:
    return lambda _values: href(*parts)


_all_subjects, _tokens = _page("subjects"), _page("access")
_rights, _quotas = _page("access", "rights"), _page("access", "quotas")


SUBJECT = Field("subject", "Subject", "fixed", is_required=True)
GROUP = Field("group", "Consumer group", "fixed", is_required=True)
CLIENT = Field(
    "client", "Only consumers of this name", "text", "--client", help="Empty: the whole group."
)
BROKER = Field("broker", "Broker group", "fixed", is_required=True)
PRINCIPAL = Field("principal", "Principal", is_required=True)
FORCE = Field("force", "Even with live consumers, which end", "check", "--force")
ORDER = Field(
    "order_strategy",
    "Order",
    "select",
    "--order-strategy",
    usual="strict",
    options=("strict", "best_tried"),
    help="strict waits for a partition as long as it takes; best_tried uses another after some "
    "seconds, and says so.",
)
RETENTION = Field(
    "retention",
    "A message is kept until",
    "select",
    "--retention",
    usual="acked",
    options=("acked", "time"),
    help="acked: every group has handled it. time: it has reached its age.",
)
SELECTED = (
    SUBJECT,
    GROUP,
    Field("key_hex", "Key", "fixed", "--key-hex", texts=key_texts),
    Field("no_key", "Messages without a key", "mark", "--no-key"),
    Field("dead", "Dead letters of any key", "mark", "--dead"),
    Field("partition", "Only on this partition", "number", "--partition"),
    Field("error", "Only with this in the last error", "text", "--error"),
)
GRANTED = (
    PRINCIPAL,
    Field(
        "right", "Right", "select", options=("produce", "consume", "read", "administer", "cluster")
    ),
    Field("subject", "Subjects", "text", "--subject", usual="*", default="*"),
    Field("consumer_group", "Consumer groups", "text", "--group", usual="*", default="*"),
)
FOR_SUBJECTS = Field("for_subjects", "The name is one of subjects", "check", "--for-subjects")


def _unchanged(field: Field) -> Field:
    """Return a field whose first choice changes nothing."""
    return replace(field, usual="", options=("", *field.options), help="")


def _fixed(field: Field) -> Field:
    return replace(field, kind="mark" if field.kind == "check" else "fixed")


ACTS: dict[str, Act] = {
    # ── subjects ──────────────────────────────────────────────────────────────────────────────────
    "subject-create": Act(
        "Create a subject",
        "subject create",
        subjects.create_subject,
        (
            Field("subject", "Name", is_required=True),
            Field("partitions", "Partitions", "number", None, default="4"),
            ORDER,
            RETENTION,
            Field("static", "A fixed number of logic queues", "check", "--static"),
        ),
        "A subject is what producers send to and consumers subscribe to.",
        button="Create",
        words=subjects.size_words,
        back=_all_subjects,
        after=subject_page,
    ),
    "subject-set": Act(
        "Settings",
        "subject set",
        subjects.set_subject,
        (SUBJECT, _unchanged(ORDER), _unchanged(RETENTION)),
        "Every open partition is continued by one with the new settings; stored messages keep "
        "those under which they were stored.",
        button="Change",
        has_plan=True,
    ),
    "subject-delete": Act(
        "Delete a subject",
        "subject delete",
        subjects.delete_subject,
        (SUBJECT, FORCE),
        "Its messages and its consumer groups are gone for good.",
        button="Delete",
        end="--yes",
        typed=("subject",),
        after=_all_subjects,
    ),
    # ── partitions and brokers ────────────────────────────────────────────────────────────────────
    "resize": Act(
        "Resize",
        "subject resize",
        operations.resize,
        (
            SUBJECT,
            Field(
                "partitions", "Partitions, 1 to 1024", "number", "--partitions", is_required=True
            ),
        ),
        "Change the number of open partitions while the subject is in use. Every key keeps its "
        "order, and partitions whose range stays the same are kept.",
        has_plan=True,
    ),
    "grow": Act(
        "Grow",
        "subject grow",
        operations.grow,
        (SUBJECT, Field("queues", "Queues", "number", "--queues", is_required=True)),
        "Split the widest logic queues until there are so many. A queue keeps its number, its "
        "offsets and the first half of its range.",
        has_plan=True,
    ),
    "move": Act(
        "Move partitions",
        "subject move",
        operations.move,
        (
            replace(SUBJECT, word=None),
            Field(
                "partitions",
                "Ids of open partitions",
                "list",
                is_required=True,
                help="Numbers with spaces between them.",
            ),
            Field("to", "Broker group to move to", "text", "--broker-group", is_required=True),
        ),
        "Continue open partitions on another broker group. What is stored stays where it is, and "
        "is read first.",
        button="Move",
        has_plan=True,
    ),
    "split": Act(
        "Split a partition",
        "subject split",
        operations.split,
        (Field("partition", "Partition", "fixed", is_required=True),),
        "Cut an open partition in the middle of its range.",
        button="Split",
        has_plan=True,
    ),
    "operation-cancel": Act(
        "Cancel an operation",
        "subject cancel",
        operations.cancel_operation,
        (Field("id", "Operation", "fixed", is_required=True),),
        "An operation that has not begun to seal partitions can be canceled; later it can only be "
        "completed.",
        button="Cancel the operation",
    ),
    "cordon": Act(
        "Cordon",
        "broker cordon",
        operations.cordon,
        (BROKER,),
        "It gets no new partitions, and keeps those that it has.",
    ),
    "uncordon": Act(
        "Uncordon",
        "broker uncordon",
        operations.uncordon,
        (BROKER,),
        "New partitions may be placed on it again.",
    ),
    "evacuate": Act(
        "Evacuate",
        "broker evacuate",
        operations.evacuate,
        (
            BROKER,
            Field(
                "without_source",
                "The broker does not answer",
                "check",
                "--without-source",
                help="best_tried subjects continue; strict ones wait for its return.",
            ),
            Field(
                "accept_loss",
                "Its disk is lost for good",
                "check",
                "--accept-loss",
                help="Messages that only it had are given up.",
            ),
        ),
        "Continue all its partitions, of every subject, on other broker groups, and give it no new "
        "ones until it is uncordoned.",
        end="--yes",
        has_plan=True,
        typed=("broker",),
    ),
    # ── consumer groups ───────────────────────────────────────────────────────────────────────────
    "why": Act(
        "Why does nothing come?",
        "why",
        groups.why,
        (
            SUBJECT,
            replace(GROUP, word="--group"),
            Field("key", "Order key", "text", None, help="Empty: every key of the group."),
            Field("hex", "The key is hexadecimal", "check", None),
        ),
        "What producers, brokers, the metaserver and consumers know of it, the most likely cause "
        "first.",
        button="Ask",
        words=groups.why_words,
        is_question=True,
    ),
    "group-create": Act(
        "Create a consumer group",
        "group create",
        groups.create_group,
        (
            SUBJECT,
            Field("group", "Name", is_required=True),
            Field(
                "start",
                "Starts at",
                "text",
                "--start",
                usual="earliest",
                default="earliest",
                help="earliest, latest, a time ago such as -1h, or an ISO 8601 time.",
            ),
            Field(
                "strategy",
                "Strategy",
                "select",
                "--strategy",
                usual="exclusive",
                options=("exclusive", "shared"),
            ),
        ),
        "It gets every message from where it starts, also those that are sent before its first "
        "consumer runs.",
        button="Create",
        back=subject_page,
        after=group_page,
    ),
    "group-suspend": Act(
        "Suspend",
        "group suspend",
        groups.suspend,
        (SUBJECT, GROUP, CLIENT),
        "Consumers release their partitions, and get none until they are resumed. They stay open; "
        "later ones are suspended too.",
    ),
    "group-resume": Act(
        "Resume",
        "group resume",
        groups.resume,
        (SUBJECT, GROUP, CLIENT),
        "Undo a suspension with the same name.",
    ),
    "group-reset": Act(
        "Reset",
        "group reset",
        groups.reset,
        (
            SUBJECT,
            GROUP,
            Field(
                "to",
                "To",
                "text",
                "--to",
                is_required=True,
                default="earliest",
                help="earliest, latest, a time ago such as -1h, an ISO 8601 time, or an offset of "
                "one partition.",
            ),
            Field("partition", "Only this partition", "number", "--partition"),
            Field(
                "live",
                "Also with live consumers, which hand over their partitions",
                "check",
                "--live",
            ),
        ),
        "Set where the group reads on. Messages before the new place that were not handled are "
        "skipped; those after it are handled again.",
        end="--yes",
        has_plan=True,
        typed=("group",),
    ),
    "reset-cancel": Act(
        "Cancel the reset",
        "group reset",
        groups.cancel_reset,
        (SUBJECT, GROUP),
        "A reset that still waits for consumers to hand over can be canceled.",
        end="--cancel",
    ),
    "group-set": Act(
        "Failure policy",
        "group set",
        groups.set_group,
        (
            SUBJECT,
            GROUP,
            Field(
                "on_failure",
                "After the last try",
                "select",
                "--on-failure",
                options=("", "block", "park", "dead"),
                help="block: its key waits for ever. park: its key is set aside, in order. dead: "
                "only the message is.",
            ),
            Field("tries_max", "Tries", "number", "--tries-max"),
            Field(
                "on_full",
                "If no more can be parked",
                "select",
                "--on-full",
                options=("", "block", "dead"),
            ),
            Field("forget", "First forget the stored policy", "check", "--forget"),
        ),
        "What the group does with a message that keeps failing. It overrides the settings in the "
        "consumers' code.",
        button="Store",
    ),
    "group-delete": Act(
        "Delete a consumer group",
        "group delete",
        groups.delete_group,
        (SUBJECT, GROUP, FORCE),
        "Its progress is gone for good. A later group of this name starts at the first message "
        "that is still stored.",
        button="Delete",
        end="--yes",
        typed=("group",),
        after=subject_page,
    ),
    # ── parked messages ───────────────────────────────────────────────────────────────────────────
    "redrive": Act(
        "Redrive",
        "parked redrive",
        parked.redrive,
        (*SELECTED, Field("all", "Every parked key", "check", "--all-keys")),
        "Have parked messages handled again, oldest first. The key stays in order.",
        end="--yes",
        back=parked.parked_page,
    ),
    "skip": Act(
        "Skip parked messages",
        "parked skip",
        parked.skip,
        (
            *SELECTED,
            Field("first", "How many of each key, from the oldest on", "number", None, default="1"),
            Field("all_messages", "All that are parked now", "check", None),
        ),
        "No consumer will get these messages. They stay stored until retention removes them.",
        button="Skip",
        end="--yes",
        words=parked.skip_words,
        typed=("key_hex", "group"),
        back=parked.parked_page,
    ),
    "edit": Act(
        "Edit a parked message",
        "parked edit",
        parked.edit,
        (
            SUBJECT,
            GROUP,
            Field("partition", "Partition", "fixed", "--partition", is_required=True),
            Field("offset", "Offset", "fixed", "--offset", is_required=True),
            Field("value", "New value, as text", "area", "--value"),
        ),
        "Consumers get the new value. The original stays in the log, and the key stays.",
        button="Edit",
        prefill=parked.present_value,
        back=parked.parked_page,
    ),
    # ── access ────────────────────────────────────────────────────────────────────────────────────
    "token-create": Act(
        "Create a token",
        "access token create",
        access.create_token,
        (
            PRINCIPAL,
            Field("label", "What uses it", "text", "--label"),
            Field("ends", "Ends", "text", "--ends", help="An ISO 8601 time in UTC; empty: never."),
        ),
        "The token is shown once; the servers store only its hash.",
        button="Create",
        back=_tokens,
    ),
    "token-revoke": Act(
        "Revoke a token",
        "access token revoke",
        access.revoke_token,
        (Field("id", "Token", "fixed", is_required=True),),
        "Brokers refuse it within seconds. It cannot be made valid again.",
        button="Revoke",
        typed=("id",),
        back=_tokens,
    ),
    "grant": Act(
        "Grant a right",
        "access grant",
        access.grant,
        GRANTED,
        "Patterns are a name, or the beginning of names followed by *.",
        button="Grant",
        back=_rights,
    ),
    "grant-revoke": Act(
        "Revoke a right",
        "access revoke",
        access.revoke_grant,
        tuple(map(_fixed, GRANTED)),
        "Exactly this right, with these patterns.",
        button="Revoke",
        typed=("principal",),
        back=_rights,
    ),
    "quota-set": Act(
        "Set a quota",
        "access quota set",
        access.set_quota,
        (
            Field(
                "name",
                "Principal, or subjects",
                is_required=True,
                help="* is all principals without a quota of their own.",
            ),
            FOR_SUBJECTS,
            *(
                Field(name, label, "number", word, usual="0", default="0")
                for name, word, label in access.LIMITS
            ),
        ),
        "The limits replace all earlier ones of this name; 0 is no limit.",
        button="Set",
        back=_quotas,
    ),
    "quota-unset": Act(
        "Remove a quota",
        "access quota unset",
        access.unset_quota,
        (Field("name", "Name", "fixed", is_required=True), _fixed(FOR_SUBJECTS)),
        "The name has no limits of its own any more.",
        button="Remove",
        typed=("name",),
        back=_quotas,
    ),
}


class ActForm(NamedTuple):
    """What a page shows of the form of an act."""

    act: Act
    address: str
    values: Mapping[str, str]
    """The values of its fields."""
    command: str
    typed: str
    """What is typed again to confirm the act; "" if nothing is."""
    back: str
    """Where the act was begun."""
    after: str
    """Where to look at what was done."""
    choices: Mapping[str, Sequence[str]]
    """What can be chosen for a field that takes a text, by the field's name."""


def act_form(
    name: str, values: Mapping[str, str], choices: Mapping[str, Sequence[str]] | None = None
) -> ActForm:
    """Return the form of an act with these values."""
    act = ACTS[name]
    shown = act.only_own(values)
    back = act.back(shown)
    return ActForm(
        act=act,
        address=href("act", name),
        values=shown,
        command=command_text(act, shown),
        typed=act.to_type(shown),
        back=back,
        after=act.after(shown) if act.after else back,
        choices=choices or {},
    )
