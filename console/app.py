"""Answers browsers: who looks, which page, what headers.

PageRequest ─▶ sign-in ─▶ Feed of that principal ─▶ view ─▶ HTML
                  │                                  ╰────▶ live: what changes, each second
                  ╰─ none, where access control is on ─▶ the form to sign in
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from ..protocol.clock import Clock
from ..protocol.errors import (
    AccessDeniedError,
    ConfigError,
    Fate,
    GroupUnknownError,
    InvalidRequestError,
    KeylaneError,
    NotFoundError,
    PartitionUnknownError,
    SubjectUnknownError,
)
from ..protocol.http.tls_settings import TlsSettings
from ..rpc.environment import Environment
from ..rpc.pages import PageAnswer, PageRequest
from .acts.act import Act, ActResult, Form, command_text, run
from .acts.table import ACTS, act_form
from .assets import Assets
from .feed import Feed
from .feeds import Feeds
from .html import Html
from .live import Live, encode_error
from .page import Link, Page, href
from .sign_in import COOKIE, SIGNED_OUT, cookie_for, form_token, is_own_form, read_token
from .views import access, brokers, groups, messages, parked, subjects
from .views.overview import overview

View = Callable[[Feed, Mapping[str, str], Mapping[str, str]], Awaitable[Page]]
PATH_CHARS_MAX = 4_000
CHECKED_MS = 5_000
"""How often it is checked whether the reader of a stream is still signed in, in milliseconds."""
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
FOREIGN_FORM = "Nothing was done: the form was made under another sign-in. Look at it again."
FORM_BEFORE_RESTART = (
    "Nothing was done: the metaserver was restarted since. Look at the form again."
)
"""Without access control, forms are made with a secret that a restart changes."""
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
PARKED_MESSAGES = re.compile(f"{IN_GROUP}/parked/messages")
MESSAGES = re.compile(f"/subjects/{NAME}/(messages|tail)")
_PATTERNS = [(re.compile(path), view, names) for path, view, names in VIEWS]


class SignIn(NamedTuple):
    """Who looks."""

    token: str
    """The access token; "" without access control."""
    principal: str
    secret: str
    """What forms are made with: the token, or something that a restart changes."""


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
            onward = None
            if (found := PARKED_MESSAGES.fullmatch(path)) is not None:
                keys = href("subjects", found[1], "groups", found[2], "parked")
                onward = Link("To the group's parked keys", keys)
            return self._failed(error, who, onward)

    async def _answer_signed_in(self, request: PageRequest, path: str, who: SignIn) -> PageAnswer:
        if path == "/live" and request.method == "GET":
            address = request.query.get("page", "")
            view = _route(address)
            return self._stream(
                request,
                who,
                lambda feed, _: self._live.stream((who.token, address), _bound(*view, feed)),
            )
        async with self._feeds.use(who.token) as (feed, environment):
            if path.startswith("/act/"):
                return await self._act(request, path.removeprefix("/act/"), feed, who)
            if request.method != "GET":
                raise InvalidRequestError("this page takes no form")
            if (match := MESSAGES.fullmatch(path)) is None:
                return self._page(await _bound(*_route(path, request.query), feed)(), who)
            subject = match[1]
            if match[2] == "tail":
                return self._stream(
                    request, who, lambda _, used: self._tails.stream(subject, request.query, used)
                )
            page = await messages.messages(
                feed,
                {"subject": subject},
                request.query,
                address=self._address,
                environment=environment,
            )
            return self._page(page, who)

    def _stream(
        self,
        request: PageRequest,
        who: SignIn,
        open_stream: Callable[[Feed, Environment], AsyncGenerator[bytes, None]],
    ) -> PageAnswer:
        """Answer with a stream. Its feed stays open meanwhile, and it ends with the sign-in."""

        async def events() -> AsyncGenerator[bytes, None]:
            checked_ms = self._clock.boot_ms()
            try:
                async with (
                    self._feeds.use(who.token) as held,
                    aclosing(open_stream(*held)) as stream,
                ):
                    async for event in stream:
                        yield event
                        if self._is_guarded and self._clock.boot_ms() - checked_ms >= CHECKED_MS:
                            await request.identify(who.token)
                            checked_ms = self._clock.boot_ms()
            except KeylaneError as error:
                yield encode_error(error)

        headers = HEADERS | {"Content-Type": "text/event-stream; charset=utf-8"}
        return PageAnswer(headers=headers, events=events())

    # ── acts ──────────────────────────────────────────────────────────────────────────────────────
    async def _act(self, request: PageRequest, name: str, feed: Feed, who: SignIn) -> PageAnswer:
        """Show the form of an act, its plan, or what it has done."""
        act = ACTS.get(name)
        if act is None:
            raise InvalidRequestError(f"there is no act {name!r:.40}", unknown_call=1)
        if request.method == "GET":
            values = act.defaults() | dict(request.query)
            if act.prefill is not None:
                values |= await act.prefill(feed.admin, Form(values))
            return self._act_page(act, name, values, who)
        values = act.only_own(request.form)
        step = request.form.get("step", "")
        if not is_own_form(who.secret, request.form.get("csrf", "")):
            problem = FOREIGN_FORM if self._is_guarded else FORM_BEFORE_RESTART
            return self._act_page(act, name, values, who, problem=problem, status=403)
        if step == "command":
            body = {"command": command_text(act, values), "typed": act.to_type(values)}
            headers = HEADERS | {"Content-Type": "application/json"}
            return PageAnswer(headers=headers, body=msgspec.json.encode(body))
        problem = ""
        missing = [
            each.label for each in act.fields if each.is_required and not values[each.name].strip()
        ]
        is_plan = act.has_plan and step == "plan"
        if missing:
            problem = f"Nothing was done: {missing[0]} is missing."
        elif not is_plan and request.form.get("typed", "") != act.to_type(values):
            problem = f"Nothing was done: type {act.to_type(values)} to confirm."
        if problem:
            return self._act_page(act, name, values, who, problem=problem, status=400)
        try:
            form = Form(values, now_ms=self._clock.wall_ms(), dry_run=is_plan)
            done = await run(act, feed.admin, form)
        except SIGNED_OUT:
            problem = "Your sign-in ended in the middle of it: look at what was done."
            return self._ask_to_sign_in(request, problem)
        except KeylaneError as error:
            fate = "It is not known whether it was done: "
            if error.fate is Fate.NOT_DONE or is_plan:
                fate = "Nothing was done: "
            problem = f"{'' if act.is_question else fate}{error.message}."
            return self._act_page(
                act,
                name,
                values,
                who,
                problem=problem,
                hint=error.hint.removeprefix("Nothing was done. "),
                status=_status_of(error),
            )
        finally:
            feed.forget_operations()  # one may have begun even if the answer is an error
        if is_plan:
            return self._act_page(act, name, values, who, plan=done.lines)
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
        extra = {"problem": problem, "hint": hint, "plan": plan, "done": done}
        page = Page(
            title=act.title,
            template="act.html",
            is_live=False,
            extra=extra | {"form": act_form(name, values)},
        )
        return self._page(page, who, status)

    # ── who looks ─────────────────────────────────────────────────────────────────────────────────
    async def _identify(self, request: PageRequest) -> SignIn | None:
        """Return who sent a request; None if nobody is signed in, or no longer."""
        if not self._is_guarded:
            return SignIn("", "", self._secret)
        token = request.cookies.get(COOKIE, "")
        if not token:
            return None
        try:
            token = read_token(token)
            return SignIn(token, await request.identify(token), token)
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
        kept = ACTS[name].only_own(request.form, "kept-")
        answer = self._act_page(ACTS[name], name, kept, SignIn(token, principal, token))
        return replace(answer, headers={**answer.headers, **cookie})

    def _sign_out(self, request: PageRequest) -> PageAnswer:
        token = request.cookies.get(COOKIE, "")
        if not token:
            return _see_other("/console", {})  # the sign-in has ended by itself
        if not is_own_form(token, request.form.get("csrf", "")):
            raise InvalidRequestError("the form was made under another sign-in")
        return _see_other("/console", {"Set-Cookie": cookie_for("", is_secure=request.is_secure)})

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
        return self._html_answer(
            page, status=status, principal=who.principal, csrf=form_token(who.secret)
        )

    def _html_answer(self, page: Page, *, status: int, **context: object) -> PageAnswer:
        body = self._html.render(page, is_guarded=self._is_guarded, **context)
        headers = HEADERS | {"Content-Type": "text/html; charset=utf-8"}
        return PageAnswer(status=status, headers=headers, body=body)

    def _failed(
        self, error: KeylaneError, who: SignIn | None, onward: Link | None = None
    ) -> PageAnswer:
        """Return the page of an error, with a link to where the user may continue."""
        page = Page(title=_title_of(error), template="error.html", is_live=False)
        return self._html_answer(
            page,
            status=_status_of(error),
            principal=who.principal if who else "",
            csrf=form_token(who.secret) if who else "",
            error=error,
            onward=onward or Link("To the overview", "/console"),
        )


def _bound(
    view: View, names: Mapping[str, str], query: Mapping[str, str], feed: Feed
) -> Callable[[], Awaitable[Page]]:
    return lambda: view(feed, names, query)


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
    error = InvalidRequestError("there is no such page in the console", unknown_call=1)
    error.hint = ""
    raise error


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
