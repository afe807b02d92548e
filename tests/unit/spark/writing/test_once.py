"""What a job with a name finds under it, and what it does then."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from keylane.protocol.errors import KeylaneError, PublishError, Reason, SubjectDeletedError
from keylane.spark.writing.batch_writer import create_once
from support.raising import raises

MADE = SimpleNamespace(route=SimpleNamespace(subject_id=9))


class Names:
    """Hidden subjects that answer as a test says, and note what they were asked."""

    def __init__(self, *answers: object) -> None:
        self._answers: Iterator[object] = iter(answers)
        self.asked: list[str] = []

    def __call__(self, name: str, subject_id: int) -> SimpleNamespace:
        def call(what: str):
            async def answer() -> object:
                self.asked.append(f"{what} {name} {subject_id}")
                given = next(self._answers)
                if isinstance(given, KeylaneError):
                    raise given
                return given

            return answer

        return SimpleNamespace(**{what: call(what) for what in ("create", "publish", "delete")})


class Ticks:
    """A clock that goes on by 10 ms with each look."""

    now_ms = 0

    def boot_ms(self) -> int:
        self.now_ms += 10
        return self.now_ms


async def made(names: Names, timeout_ms: int = 100) -> tuple[str, int]:
    return await create_once("a.hidden-j-1", names, timeout_ms=timeout_ms, clock=Ticks())  # type: ignore[arg-type]


async def test_job_is_made_anew_when_another_driver_has_left_something():
    """Also while a broker still drops what was deleted."""
    names = Names(PublishError(Reason.HIDDEN_TAKEN), None, SubjectDeletedError(), MADE)
    assert await made(names) == ("a.hidden-j-1", 9)
    create = "create a.hidden-j-1 0"
    assert names.asked == [create, "delete a.hidden-j-1 0", create, create]


async def test_job_is_done_when_it_was_published():
    """The publication of this very subject is waited for, and no other one is begun."""
    names = Names(PublishError(Reason.PUBLISH_TARGET, published_id=7), None)
    assert await made(names) == ("a.hidden-j-1", 0)
    assert names.asked[1] == "publish a.hidden-j-1 7"


async def test_job_takes_the_next_name_when_its_publication_was_canceled():
    names = Names(
        *(
            PublishError(Reason.PUBLISH_TARGET, published_id=7),
            PublishError(Reason.PUBLISH_OUTDATED),
        ),
        *(
            PublishError(Reason.PUBLISH_TARGET, published_id=8),
            PublishError(Reason.PUBLISH_OUTDATED),
        ),
        MADE,
    )
    assert await made(names) == ("a.hidden-j-1.2", 9)


async def test_job_is_refused_when_its_name_is_that_of_something_else():
    """Nothing of the name was published: it is a subject, or hidden for another target."""
    names = Names(PublishError(Reason.PUBLISH_TARGET))
    with raises(Reason.PUBLISH_TARGET):
        await made(names)
    assert len(names.asked) == 1


@pytest.mark.parametrize(
    "error", [PublishError(Reason.HIDDEN_TAKEN), SubjectDeletedError()], ids=repr
)
async def test_job_gives_up_when_its_name_is_not_free_in_time(error):
    """Drivers that delete what the other one has made end, and so does one that waits for a
    broker.
    """
    names = Names(*(3 * ([error, None] if error.reason is Reason.HIDDEN_TAKEN else [error])))
    with pytest.raises(type(error)):
        await made(names, timeout_ms=30)
