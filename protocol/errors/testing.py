"""What ends a story of `keylane.testing`: limits, the real world, programs that failed, clusters
used elsewhere.  Pure.
"""

from __future__ import annotations

from .base import Detail, KeylaneError


class StoryStuckError(KeylaneError):
    """A story did not end within its limits; the text says what each program waits for."""

    code = 1281
    summary = "the story did not end"
    hint = (
        "The story waits for something that never happens: see the lines above.  Give a longer "
        "story more time: limit_s=, real_limit_s=."
    )
    virtual_s = Detail(float)


class RealWorldError(KeylaneError):
    """Code in a story called what virtual time cannot wait for: a real sleep, a thread, a
    socket.
    """

    code = 1282
    summary = "a story has no real sleeps, threads and sockets"
    hint = (
        "Use asyncio.sleep and asyncio.to_thread, which take no real time, and replace other "
        "services by fakes; "
        "keylane.sync is for tests against a real cluster."
    )
    call = Detail(str)


class ProgramFailedError(KeylaneError):
    """A program of a story ended with an exception, which is the cause of this error."""

    code = 1283
    summary = "a program of the story failed"
    hint = (
        "The cause is below the program's name; `await program.wait()` raises it where a test "
        "expects it."
    )
    program = Detail(str)


class ConditionNotMetError(KeylaneError):
    """A condition did not become true within its virtual time."""

    code = 1284
    summary = "the condition did not become true"
    hint = (
        "Virtual time costs nothing: give it more with within_s=, or look at what the condition "
        "last returned."
    )
    within_s = Detail(float)


class StoryError(KeylaneError):
    """A cluster was used outside of its story, or in a way that its story does not allow."""

    code = 1285
    summary = "this is not possible outside of the story"
    hint = "A VirtualCluster runs one story; start, kill and query its programs inside that story."
