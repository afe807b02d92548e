"""Answers browsers: who looks, which page, what headers.

PageRequest ─▶ sign-in ─▶ Feed of that principal ─▶ view ─▶ HTML
                  │                                  ╰────▶ live: what changes, each second
                  ╰─ none, where access control is on ─▶ the form to sign in
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from ..protocol.clock import Clock
from ..protocol.errors import (
    AccessDeniedError,
    CapabilityEndedError,
    ConfigError,
    Fate,
    GroupUnknownError,
    InvalidRequestError,
    KeylaneError,
    NotFoundError,
    PartitionUnknownError,
    SubjectUnknownError,
    UnauthenticatedError,
)
from ..protocol.http.tls_settings import TlsSettings
from ..rpc.pages import PageAnswer, PageRequest
from .acts.act import Act, ActResult, command_text
from .acts.table import ACTS
from .assets import Assets
from .feed import Feed
from .feeds import Feeds
from .html import Html
from .live import Live
from .page import Page, href
from .sign_in import COOKIE, cookie_for, form_token, is_own_form, read_token
from .views import access, brokers, groups, messages, parked, subjects
from .views.overview import overview

View = Callable[[Feed, Mapping[str, str], Mapping[str, str]], Awaitable[Page]]
PATH_CHARS_MAX = 4_000
SIGNED_OUT = (UnauthenticatedError, CapabilityEndedError)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # no-referrer would have browsers send forms with the origin "null"
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Sent with every answer."""
NAME = "([^/]+)"
IN_GROUP = f"/subjects/{NAME}/groups/{NAME}"
VIEWS: tuple[tuple[str, View, tuple[str, ...]], ...] = (
    ("", overview, ()),
    ("/subjects", subjects.subjects, ()),
    (f"/subjects/{NAME}", subjects.subject, ("subject",)),
    (f"/subjects/{NAME}/lineage", subjects.lineage, ("subject",)),
    (f"/subjects/{NAME}/partitions/{NAME}", subjects.partition, ("subject", "partition")),
    (IN_GROUP, groups.group, ("subject", "group")),
    (f"{IN_GROUP}/parked", parked.parked, ("subject", "group")),
    (f"{IN_GROUP}/parked/messages", parked.parked_messages, ("subject", "group")),
    ("/consumers", groups.consumers, ()),
    ("/consumer", groups.consumer, ()),
    ("/brokers", brokers.brokers, ()),
    (f"/brokers/{NAME}", brokers.broker, ("broker",)),
    ("/access", access.tokens, ()),
    ("/access/rights", access.rights, ()),
    ("/access/quotas", access.quotas, ()),
    ("/access/audit", access.audit, ()),
)
"""The path of each page below /console, its view, and the names in the path."""
MESSAGES = re.compile(f"/subjects/{NAME}/(messages|tail)")
_PATTERNS = [(re.compile(path), view, names) for path, view, names in VIEWS]


class SignIn(NamedTuple):
    """Who looks."""

    token: str
    """The access token; "" without access control."""
    principal: str


class Console:
    """
    The console of a metaserver.

    Args:
        address: the metaserver's own address, `host:port`.
        tls: the TLS for calls to it.
        is_guarded: True if access control is on.
    """

    def __init__(
        self, address: str, *, tls: TlsSettings | None, is_guarded: bool, clock: Clock
    ) -> None:
        self._is_guarded = is_guarded
        self._clock = clock
        self._address = address
        self._assets = Assets()
        self._html = Html(self._assets, clock)
        self._feeds = Feeds(address, tls=tls, clock=clock)
        self._live = Live(clock)
        self._tails = messages.Tails(address)
        self._secret = secrets.token_hex(32)
        """What forms are made with where nobody signs in."""

    async def close(self) -> None:
        """End all streams, and close all clients."""
        await self._live.close()
        await self._feeds.close()

    async def answer(self, request: PageRequest) -> PageAnswer:
        """Answer a browser."""
        path = request.path.rstrip("/")
        try:
            if len(path) > PATH_CHARS_MAX:
                raise InvalidRequestError("the address is too long")
            if request.method == "GET" and path.startswith("/static/"):
                return self._asset(path.removeprefix("/static/"), request.query)
            if path == "/sign-in" and request.method == "POST":
                return await self._sign_in(request)
            if path == "/sign-out" and request.method == "POST":
                return self._sign_out(request)
            who = await self._identify(request)
        except KeylaneError as error:
            return self._failed(error, None)
        if who is None:
            is_act = request.method == "POST"
            return self._ask_to_sign_in(
                request, "Nothing was done: your sign-in has ended." if is_act else ""
            )
        try:
            return await self._answer_signed_in(request, path, who)
        except SIGNED_OUT:
            return self._ask_to_sign_in(request, "Your sign-in has ended.")
        except KeylaneError as error:
            return self._failed(error, who)

    async def _answer_signed_in(self, request: PageRequest, path: str, who: SignIn) -> PageAnswer:
        feed = await self._feeds.of(who.token)
        if path.startswith("/act/"):
            return await self._act(request, path.removeprefix("/act/"), feed, who)
        if request.method != "GET":
            raise InvalidRequestError("this page takes no form")
        if path == "/live":
            address = request.query.get("page", "")
            build = _bound(*_route(address), feed)
            return _stream(self._live.stream((who.token, address), build))
        if (match := MESSAGES.fullmatch(path)) is not None:
            subject = match[1]
            environment = await self._feeds.environment(who.token)
            if match[2] == "tail":
                return _stream(self._tails.stream(subject, request.query, environment))
            page = await messages.messages(
                feed,
                {"subject": subject},
                request.query,
                address=self._address,
                environment=environment,
            )
            return self._page(page, who)
        return self._page(await _bound(*_route(path, request.query), feed)(), who)

    # ── acts ──────────────────────────────────────────────────────────────────────────────────────
    async def _act(self, request: PageRequest, name: str, feed: Feed, who: SignIn) -> PageAnswer:
        """Show the form of an act, its plan, or what it has done."""
        act = ACTS.get(name)
        if act is None:
            raise InvalidRequestError(f"there is no act {name!r:.40}", unknown_call=1)
        if request.method == "GET":
            values = {each.name: each.default for each in act.fields} | dict(request.query)
            if act.prefill is not None:
                values |= await act.prefill(feed.admin, values)
            return self._act_page(act, name, values, who)
        values = {each.name: request.form.get(each.name, "") for each in act.fields}
        step = request.form.get("step", "")
        if not is_own_form(who.token or self._secret, request.form.get("csrf", "")):
            problem = "Nothing was done: the form was made under another sign-in. Look at it again."
            return self._act_page(act, name, values, who, problem=problem, status=403)
        if step == "command":
            body = {
                "command": command_text(act.command(values)),
                "typed": values.get(act.typed, ""),
            }
            headers = HEADERS | {"Content-Type": "application/json"}
            return PageAnswer(headers=headers, body=msgspec.json.encode(body))
        return await self._take_step(act, name, step, request, feed, who)

    async def _take_step(
        self, act: Act, name: str, step: str, request: PageRequest, feed: Feed, who: SignIn
    ) -> PageAnswer:
        values = {each.name: request.form.get(each.name, "") for each in act.fields}
        given = values | {"now_ms": str(self._clock.wall_ms())}
        missing = [
            each.label for each in act.fields if each.is_required and not values[each.name].strip()
        ]
        if missing:
            problem = f"Nothing was done: {missing[0]} is missing."
            return self._act_page(act, name, values, who, problem=problem, status=400)
        try:
            if step == "plan" and act.plan is not None:
                plan = await act.plan(feed.admin, given)
                return self._act_page(act, name, values, who, plan=plan)
            if act.typed and request.form.get("typed", "") != values[act.typed]:
                problem = f"Nothing was done: type {values[act.typed]} to confirm."
                return self._act_page(act, name, values, who, problem=problem, status=400)
            done = await act.do(feed.admin, given)
        except SIGNED_OUT:
            problem = "Your sign-in ended in the middle of it: look at what was done."
            return self._ask_to_sign_in(request, problem)
        except KeylaneError as error:
            fate = "It is not known whether it was done"
            if error.fate is Fate.NOT_DONE or step == "plan":
                fate = "Nothing was done"
            problem = f"{fate}: {error.message}."
            return self._act_page(
                act, name, values, who, problem=problem, hint=error.hint, status=_status_of(error)
            )
        return self._act_page(act, name, values, who, done=done)

    def _act_page(
        self,
        act: Act,
        name: str,
        values: Mapping[str, str],
        who: SignIn,
        *,
        problem: str = "",
        hint: str = "",
        plan: tuple[str, ...] = (),
        done: ActResult | None = None,
        status: int = 200,
    ) -> PageAnswer:
        shown = {each.name: values.get(each.name, "") for each in act.fields}
        back = act.back(shown)
        page = Page(
            title=act.title,
            template="act.html",
            is_live=False,
            extra={
                "act": act,
                "address": href("act", name),
                "values": shown,
                "command": command_text(act.command(shown)),
                "problem": problem,
                "hint": hint,
                "plan": plan,
                "done": done,
                "back": back,
            },
        )
        return self._page(page, who, status)

    # ── who looks ─────────────────────────────────────────────────────────────────────────────────
    async def _identify(self, request: PageRequest) -> SignIn | None:
        """Return who sent a request; None if nobody is signed in, or no longer."""
        if not self._is_guarded:
            return SignIn("", "")
        token = request.cookies.get(COOKIE, "")
        if not token:
            return None
        try:
            token = read_token(token)
            return SignIn(token, await request.identify(token))
        except (ConfigError, *SIGNED_OUT):
            return None

    async def _sign_in(self, request: PageRequest) -> PageAnswer:
        back = request.form.get("back", "")
        if not re.fullmatch(r"/console([/?][^\\\x00-\x20]*)?", back):
            back = "/console"
        try:
            token = read_token(request.form.get("token", ""))
            principal = await request.identify(token)
        except (ConfigError, *SIGNED_OUT) as error:
            return self._ask_to_sign_in(request, f"{error.message}.", back=back)
        cookie = {"Set-Cookie": cookie_for(token, is_secure=request.is_secure)}
        name = request.form.get("act", "")
        if name not in ACTS:
            return _see_other(back, cookie)
        # The form of an act is kept: it comes again, filled in.
        kept = {each.name: request.form.get(f"kept-{each.name}", "") for each in ACTS[name].fields}
        answer = self._act_page(ACTS[name], name, kept, SignIn(token, principal))
        return replace(answer, headers={**answer.headers, **cookie})

    def _sign_out(self, request: PageRequest) -> PageAnswer:
        token = request.cookies.get(COOKIE, "")
        if not is_own_form(token, request.form.get("csrf", "")):
            raise InvalidRequestError("the form was made for another sign-in")
        return _see_other("/console", {"Set-Cookie": cookie_for("", is_secure=request.is_secure)})

    def _csrf(self, who: SignIn) -> str:
        return form_token(who.token or self._secret)

    def _ask_to_sign_in(
        self, request: PageRequest, problem: str = "", *, back: str = ""
    ) -> PageAnswer:
        if request.path == "/live":
            headers = HEADERS | {"Content-Type": "text/plain; charset=utf-8"}
            return PageAnswer(status=401, headers=headers, body=b"signed out")
        page = Page(title="Sign in", template="sign_in.html", is_live=False)
        if not back and request.method == "GET":
            back = _address_of(request)
        act = request.form.get("act", "")
        kept = {name: value for name, value in request.form.items() if name.startswith("kept-")}
        if request.method == "POST" and request.path.startswith("/act/"):
            act = request.path.removeprefix("/act/")
            kept = {f"kept-{name}": value for name, value in request.form.items()}
        return self._html_answer(
            page,
            status=401,
            principal="",
            csrf="",
            problem=problem,
            back=back,
            act=act,
            kept=kept,
        )

    # ── answers ───────────────────────────────────────────────────────────────────────────────────
    def _asset(self, name: str, query: Mapping[str, str]) -> PageAnswer:
        found = self._assets.get(name)
        if found is None:
            headers = HEADERS | {"Content-Type": "text/plain; charset=utf-8"}
            return PageAnswer(status=404, headers=headers, body=b"no such file")
        headers = HEADERS | {"Content-Type": found.content_type}
        if query.get("v") == found.digest:
            headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return PageAnswer(headers=headers, body=found.body)

    def _page(self, page: Page, who: SignIn, status: int = 200) -> PageAnswer:
        return self._html_answer(page, status=status, principal=who.principal, csrf=self._csrf(who))

    def _html_answer(self, page: Page, *, status: int, **context: object) -> PageAnswer:
        body = self._html.render(page, is_guarded=self._is_guarded, **context)
        headers = HEADERS | {"Content-Type": "text/html; charset=utf-8"}
        return PageAnswer(status=status, headers=headers, body=body)

    def _failed(self, error: KeylaneError, who: SignIn | None) -> PageAnswer:
        page = Page(title=_title_of(error), template="error.html", is_live=False)
        return self._html_answer(
            page,
            status=_status_of(error),
            principal=who.principal if who else "",
            csrf=self._csrf(who) if who else "",
            error=error,
        )


def _bound(
    view: View, names: Mapping[str, str], query: Mapping[str, str], feed: Feed
) -> Callable[[], Awaitable[Page]]:
    return lambda: view(feed, names, query)


def _stream(events: AsyncGenerator[bytes, None]) -> PageAnswer:
    headers = HEADERS | {"Content-Type": "text/event-stream; charset=utf-8"}
    return PageAnswer(headers=headers, events=events)


def _route(
    path: str, query: Mapping[str, str] | None = None
) -> tuple[View, dict[str, str], dict[str, str]]:
    """Return the view of an address, the names in it, and its query. Raises
    InvalidRequestError.
    """
    if query is None:
        path, _, text = path.partition("?")
        path = unquote(path).removeprefix("/console").rstrip("/")
        try:
            query = dict(parse_qsl(text, max_num_fields=50))
        except ValueError:
            raise InvalidRequestError("the address has too many parameters") from None
    for pattern, view, names in _PATTERNS:
        match = pattern.fullmatch(path)
        if match is not None:
            return view, dict(zip(names, match.groups(), strict=True)), dict(query)
    raise InvalidRequestError("there is no such page in the console", unknown_call=1)


def _address_of(request: PageRequest) -> str:
    query = f"?{urlencode(dict(request.query))}" if request.query else ""
    return f"/console{quote(request.path)}{query}"


def _see_other(address: str, headers: Mapping[str, str]) -> PageAnswer:
    return PageAnswer(status=303, headers={**HEADERS, **headers, "Location": address})


def _status_of(error: KeylaneError) -> int:
    if isinstance(error, AccessDeniedError):
        return 403
    unknown = (NotFoundError, SubjectUnknownError, GroupUnknownError, PartitionUnknownError)
    if isinstance(error, unknown) or "unknown_call" in error.details:
        return 404
    return 400 if isinstance(error, InvalidRequestError | ConfigError) else 503


def _title_of(error: KeylaneError) -> str:
    return {403: "Not allowed", 404: "Not found", 400: "Not understood"}.get(
        _status_of(error), "Not available"
    )
