"""Combines a consumer's settings with its group's stored policy and the operators' switches, which
the metaserver sends with grants.

Stored fields override the consumer's own code, so that all members of a group treat failures in the
same way, and an operator's change takes effect while they are running.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ...protocol.backoff import Backoff
from ...protocol.control import Grants
from ...protocol.groups import FailurePolicy, GroupPolicy, OperatorSwitch
from ...protocol.routing import ConsumeStrategy, OrderStrategy
from ..settings import AckMode, ConsumerSettings
from .membership import Member

log = logging.getLogger("keylane.consumer")
_DEFAULTS = ConsumerSettings()
_POLICY_FIELDS = ("on_failure", "on_full", "tries_max", "handler_backoff")
_BLOCKING = (None, FailurePolicy.BLOCK)


class EffectiveSettings:
    """
    Holds the settings in force for a consumer, and who has suspended it.

    Args:
        settings: the settings in its own code.
    """

    def __init__(self, member: Member, settings: ConsumerSettings) -> None:
        self.settings = settings
        self._code_settings = settings
        self._member = member
        self._policy = GroupPolicy()
        self._order_strategy = OrderStrategy.STRICT
        self._suspended_by = OperatorSwitch.OFF
        self._is_opening = True
        """True until the first grants have arrived."""

    def update(self, grants: Grants) -> bool:
        """Apply the policy and switches that a metaserver sent with grants, and log changes. Return
        True if `settings` were recomputed.
        """
        if grants.suspended_by is not self._suspended_by:
            self._suspended_by = grants.suspended_by
            self._log_switch()
        previous = self._policy, self._order_strategy
        is_opening, self._is_opening = self._is_opening, False
        is_changed = previous != (grants.policy, grants.order_strategy)
        if is_changed:
            self._policy = grants.policy
            self._order_strategy = grants.order_strategy
            self.settings = effective_settings(
                self._code_settings, grants.policy, grants.order_strategy
            )
        if is_opening:
            self._warn_of_unused_tries()
        if not is_changed:
            return False
        if grants.policy != previous[0]:
            self._log_policy()
        self._log_retry()
        return True

    @property
    def waiting_for(self) -> str:
        """A text for users: the operator's switch that is on, and the command that resumes
        consumption; "" if none is on.
        """
        if self._suspended_by is OperatorSwitch.OFF:
            return ""
        target, option, member = "the group", "", self._member
        if self._suspended_by is OperatorSwitch.CLIENT:
            target, option = f"client {member.client}", f" --client {member.client}"
        command = f"keylane group resume {member.subject} {member.group}{option}"
        return f"an operator has suspended {target}: {command}"

    def _log_switch(self) -> None:
        if self.waiting_for:
            log.warning("%s hands over all its partitions: %s", self._member.name, self.waiting_for)
        else:
            log.info(
                "an operator has resumed %s, which accepts partitions again", self._member.name
            )

    def _log_retry(self) -> None:
        """Log if "retry" is requested but not in force, because it would break the order of the
        subject.
        """
        requested = self._policy.on_failure or self._code_settings.on_failure
        if requested is FailurePolicy.RETRY and self.settings.on_failure is not requested:
            log.warning(
                "%s: on_failure='retry' applies to best_tried subjects and shared groups only; "
                "here failing messages are retried in place, and later messages of their keys wait",
                self._member.name,
            )

    def _warn_of_unused_tries(self) -> None:
        """Warn if the code limits the tries of a message, and the policy in force does not."""
        tries_max = self._code_settings.tries_max
        if tries_max != _DEFAULTS.tries_max and self.settings.on_failure in _BLOCKING:
            log.warning(
                "%s: tries_max=%d has no effect, because on_failure='block' retries a failing "
                "message for ever: give on_failure='park' or 'dead' too",
                self._member.name,
                tries_max,
            )

    def _log_policy(self) -> None:
        stored = stored_text(self._policy)
        overridden = [
            f"{name}={_text(getattr(self._code_settings, name))}"
            for name in _POLICY_FIELDS
            if getattr(self._code_settings, name)
            not in {getattr(_DEFAULTS, name), getattr(self.settings, name)}
        ]
        if overridden:
            log.warning(
                "%s follows the group's stored policy, %s, instead of its own code, %s",
                self._member.name,
                stored,
                ", ".join(overridden),
            )
        else:
            log.info("%s follows the group's stored policy: %s", self._member.name, stored)


def effective_settings(
    code_settings: ConsumerSettings,
    stored: GroupPolicy,
    order_strategy: OrderStrategy = OrderStrategy.STRICT,
) -> ConsumerSettings:
    """Return a consumer's settings with the stored fields in place of its own. RETRY applies only
    to shared groups and best_tried subjects; elsewhere it becomes BLOCK.
    """
    fields: dict[str, Any] = {"on_failure": stored.on_failure, "on_full": stored.on_full}
    fields["tries_max"] = fields["retry_tries_max"] = stored.tries_max
    first_ms, max_ms = stored.backoff_first_ms, stored.backoff_max_ms
    if first_ms is not None and max_ms is not None:
        backoff = Backoff(first_ms=first_ms, max_ms=max_ms)
        fields["handler_backoff"] = fields["retry_backoff"] = backoff
    shared = code_settings.consume_strategy is ConsumeStrategy.SHARED
    acks_later = code_settings.ack is not AckMode.BEFORE
    may_retry_apart = order_strategy is OrderStrategy.BEST_TRIED and not shared and acks_later
    policy = stored.on_failure or code_settings.on_failure
    if may_retry_apart and policy is None:
        fields["on_failure"] = FailurePolicy.RETRY
    elif policy is FailurePolicy.RETRY and not (may_retry_apart or (shared and acks_later)):
        fields["on_failure"] = FailurePolicy.BLOCK
    return replace(
        code_settings, **{name: value for name, value in fields.items() if value is not None}
    )


def stored_text(stored: GroupPolicy) -> str:
    """Return the stored fields as text, for log lines."""
    fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
    parts = [f"{name}={value}" for name, value in fields.items() if value is not None]
    return ", ".join(parts) or "nothing is stored, its own code applies"


def _text(value: object) -> str:
    return f"{value.first_ms}..{value.max_ms} ms" if isinstance(value, Backoff) else str(value)
