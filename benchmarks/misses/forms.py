"""Sentences with a value that differs from one request to the next, by the class of the difference.

``text`` are near misses: values that look like those of another class, and are changed by people.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha1, sha256

Values = Callable[[random.Random], tuple[str, str]]
"""Draws the value of the earlier request and of the later one."""

_MONTHS = {
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split(),
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre".split(),
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre".split(),
    "it": "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre".split(),
    "pt": "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro".split(),
}
_WEEKDAYS_DE = "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag".split()


def _moment(rng: random.Random) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=rng.randrange(330 * 86400))


def _date(form: str) -> Values:
    """``form``: strftime's, or ``{locale}`` of the months' names."""

    def values(rng: random.Random) -> tuple[str, str]:
        old = _moment(rng)
        new = old + timedelta(days=rng.choice((1, 1, 2, 7, 33)))
        return _shown(old, form), _shown(new, form)

    return values


def _shown(moment: datetime, form: str) -> str:
    for locale, names in _MONTHS.items():
        form = form.replace(f"{{{locale}}}", names[moment.month - 1])
    form = form.replace("{weekday de}", _WEEKDAYS_DE[moment.weekday()]).replace("{d}", str(moment.day))
    return moment.strftime(form.replace("{m}", str(moment.month)))


def _time(form: str) -> Values:
    def values(rng: random.Random) -> tuple[str, str]:
        old = _moment(rng).replace(hour=rng.randrange(1, 20))
        new = old + timedelta(seconds=rng.choice((7, 61, 600, 4000)))
        shown = _shown(old, form), _shown(new, form)
        return shown if shown[0] != shown[1] else (shown[0], _shown(old + timedelta(hours=3), form))

    return values


def _uuid(form: str) -> Values:
    def one(rng: random.Random) -> str:
        return form.format(uuid.UUID(int=rng.getrandbits(128), version=4))

    return lambda rng: (one(rng), one(rng))


def _epoch(scale: float, digits: int = 0) -> Values:
    def values(rng: random.Random) -> tuple[str, str]:
        old = rng.uniform(1.74e9, 1.79e9)
        return f"{old * scale:.{digits}f}", f"{(old + rng.uniform(5, 9000)) * scale:.{digits}f}"

    return values


def _count(low: int, high: int, step: int = 9, form: str = "{}") -> Values:
    def values(rng: random.Random) -> tuple[str, str]:
        old = rng.randrange(low, high)
        return form.format(old), form.format(old + rng.randrange(1, step + 1))

    return values


def _fewer(low: int, high: int) -> Values:
    def values(rng: random.Random) -> tuple[str, str]:
        old = rng.randrange(low, high)
        return str(old), str(old - rng.randrange(1, 5))

    return values


def _either(*options: str) -> Values:
    return lambda rng: (lambda pair: (pair[0], pair[1]))(rng.sample(options, 2))


def _hex(hashed: Callable[[bytes], object], chars: int) -> Values:
    def one(rng: random.Random) -> str:
        return str(hashed(rng.randbytes(8)).hexdigest())[:chars]  # type: ignore[attr-defined]

    return lambda rng: (one(rng), one(rng))


def _digits(form: str) -> Values:
    def one(rng: random.Random) -> str:
        return "".join(str(rng.randrange(10)) if char == "9" else char for char in form)

    return lambda rng: (one(rng), one(rng))


FORMS: dict[str, list[tuple[str, Values]]] = {
    "date": [
        ("Today is {}.", _date("%Y-%m-%d")),
        ("Current date: {}", _date("%d/%m/%Y")),
        ("The date is {}, and the shop is open.", _date("%B {d}, %Y")),
        ("Date: {}", _date("%m/%d/%y")),
        ("Heute ist der {}.", _date("%d.%m.%Y")),
        ("Heute ist {weekday de}, der {}.".replace("{weekday de}, der ", ""), _date("{weekday de}, der {d}. {de} %Y")),
        ("Nous sommes le {}.", _date("{d} {fr} %Y")),
        ("Hoy es {}.", _date("{d} de {es} de %Y")),
        ("Oggi: {}", _date("{d} {it} %Y")),
        ("Hoje é {}.", _date("{d} de {pt} de %Y")),
        ("今天是{}。", _date("%Y年{m}月{d}日")),
        ("오늘은 {}입니다.", _date("%Y년 {m}월 {d}일")),
        ("As of {} the following holds:", _date("%d %b %Y")),
        ("Context ({}):", _date("%A, %d %B %Y")),
        ("knowledge_date={}", _date("%Y%m%d")),
        ("Report for {}", _date("%b {d}, %Y")),
        ("<today>{}</today>", _date("%Y/%m/%d")),
        ("Stand: {}", _date("{d}.{m}.%y")),
        ("- date: {}", _date("%Y-%m-%dT00:00:00Z")),
        ("It is {} in our time zone.", _date("%a %d %b %Y")),
        ('{"today": "{}", "shop": "Bonn"}', _date("%Y-%m-%d")),
    ],
    "time": [
        ("The time is {}.", _time("%H:%M")),
        ("Current time: {}", _time("%H:%M:%S")),
        ("Now: 2026-11-22T{}Z", _time("%H:%M:%S")),
        ("It is {} now.", _time("%I:%M %p")),
        ("Generated at 2026-11-22 {}", _time("%H:%M:%S.%f")),
        ("Es ist {} Uhr.", _time("%H:%M")),
        ("Il est {}.", _time("%Hh%M")),
        ("[2026-11-22 {} UTC]", _time("%H:%M")),
        ("clock={}", _time("%H:%M:%S")),
        ("Local time {} (Europe/Berlin)", _time("%H:%M")),
        ('{"now": "2026-11-22T{}+00:00"}', _time("%H:%M:%S.%f")),
        ("Sun, 22 Nov 2026 {} GMT", _time("%H:%M:%S")),
        ("现在是{}。", _time("%H时%M分")),
        ("The session began at {}, local time.", _time("%I:%M%p")),
    ],
    "uuid": [
        ("Request {}", _uuid("{}")),
        ("Session: {}.", _uuid("{}")),
        ("request_id={}", _uuid("{}")),
        ("<trace>{}</trace>", _uuid("{}")),
        ('{"conversation": "{}"}', _uuid("{}")),
        ("Correlation id {} must not be shown.", _uuid("{!s:}".replace("{!s:}", "{}"))),
        ("You talk to user {}", _uuid("{{{}}}")),
        ("urn:uuid:{}", _uuid("{}")),
        ("[{}] The customer's words follow.", _uuid("{}")),
        ("thread/{}/messages", _uuid("{}")),
        ("Idempotency-Key: {}", lambda rng: (lambda two: (two[0].upper(), two[1].upper()))(_uuid("{}")(rng))),
        ("run_{}", _uuid("{}")),
    ],
    "epoch": [
        ("Timestamp: {}", _epoch(1)),
        ("ts={}", _epoch(1000)),
        ('{"created": {}, "shop": "Bonn"}', _epoch(1)),
        ("Unix time {}.", _epoch(1)),
        ("now: {}", _epoch(1, 3)),
        ("The clock says {} seconds since 1970.", _epoch(1)),
        ("generated_at: {}", _epoch(1000)),
        ("t0 {}", _epoch(1e9)),
        ("cache-buster: {}", _epoch(1000)),
        ("X-Time {}", _epoch(1, 6)),
        ("valid since epoch {}", _epoch(1)),
        ("[{}]", _epoch(1)),
    ],
    "counter": [
        ("This is request #{}.", _count(1, 900)),
        ("Turn {} of this conversation.", _count(1, 40)),
        ("Message number {}", _count(1, 90)),
        ("You have answered {} questions so far.", _count(3, 5000)),
        ("Attempt {}:", _count(1, 8)),
        ("Visitors today: {}", _count(20, 900, 90)),
        ("There are {} people in the queue.", _count(2, 90)),
        ("{} tokens left in this session.", _fewer(500, 9000)),
        ("seq={}", _count(100, 99999)),
        ("Step {} of 400", _count(1, 300)),
        ("The customer has {} unread messages.", _count(1, 60)),
        ("Iteration {}", _count(1, 800)),
        ("Remaining attempts: {}", _fewer(6, 60)),
        ("Conversation no. {}", _count(1000, 99999)),
        ("request_count: {}", _count(1, 9999)),
    ],
    "whitespace": [
        ("The rules are these:{}", _either("", " ", "  ")),
        ("The rules{}are these:", _either(" ", "  ", "\t")),
        ("The rules are these:{}They hold for all.", _either("\n", "\n\n", "\r\n")),
        ("{}The rules are these:", _either("", " ", "\n", "\t")),
        ("Rules:{}one, two, three", _either(" ", "\u00a0", "  ")),
        ("First rule.{}Second rule.", _either("\n", " \n", "\n ")),
        ("A list:\n{}- one\n- two", _either("", "  ", "\t")),
        ('{"shop":{}"Bonn", "open": true}', _either("", " ", "\n")),
        ("The end of the introduction.\n{}", _either("", "\n", " \n")),
        ("One,{}two and three.", _either(" ", "\u2009", "\u200b ")),
    ],
    "text": [
        ("Use version {} of the terms.", _either("1.2.3", "1.2.4", "1.3.0", "2.0.1")),
        ("The API is v{}.", _either("2", "3", "4")),
        ("A parcel costs ${}.", _either("4.90", "5.90", "12.50")),
        ("Shipping is {} € within the country.", _either("4,90", "5,90", "12,50")),
        ("Call {} for help.", _digits("+49 228 999 9999")),
        ("The phone number is {}.", _digits("(415) 999-9999")),
        ("Phone {}", _digits("1599999999")),
        ("Checksum sha256:{}", _hex(sha256, 64)),
        ("The prompt's commit is {}.", _hex(sha1, 40)),
        ("Build {}", _hex(sha1, 8)),
        ("Answer in at most {} words.", _either("100", "150", "200", "250")),
        ("Discount: {}%", _either("5", "10", "15", "20")),
        ("The server is 10.0.{}", _digits("9.99")),
        ("You are {}, an assistant.", _either("Ada", "Max", "Robin", "Kim")),
        ("Speak {} with the customer.", _either("German", "French", "English")),
        ("The limit is {} items an order.", _either("10", "12", "20")),
        ("Paragraph {} of the terms holds.", _either("3", "4", "12")),
        ("ISBN {}", _digits("978-3-16-999999-0")),
        ("Customers older than {} years may buy axes.", _either("16", "18", "21")),
        ("The model's temperature is {}.", _either("0.2", "0.7", "1.0")),
        ("The town is {}.", _either("Bonn", "Lyon", "Porto", "March", "May")),
        ("The ratio is {}.", _either("16:9", "4:3", "21:9")),
        ("Order {} is late.", _digits("9999-99-9999999")),
        ("IBAN DE{}", _digits("99 9999 9999 9999 9999 99")),
        ("Read Matthew {} first.", _either("5:44", "6:12", "7:20")),
        ("We are open {}.", _either("on weekdays", "at weekends", "every day")),
        ("Ticket price: {} USD", _either("1200", "1250", "1300")),
        ("The size is {}.", _either("20x30", "30x40", "40x60")),
        ("Postcode {}", _digits("59999")),
        ("colour: #{}", _hex(sha1, 6)),
    ],
}
