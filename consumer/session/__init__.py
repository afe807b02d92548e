"""One session for each partition of a consumer: it decides everything about its messages. Pure.

    event ─▶ step(session, event, now_ms) ─▶ Ready: requests, messages to hand out, the next time

`step.py` has the function, `events.py` what it takes and returns, and `state.py`
the value that it changes. The other files have one idea each.
"""
