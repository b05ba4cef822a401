"""Cron by brute force, from the words of docs/cron.md: sets instead of masks, zoneinfo instead of PostgreSQL's zones.

Written to be believed, not to be fast: every local date in turn, every label of a matching date in turn, each label
asked for the instants that show it. `Night` is the same around one change of the clocks, minute by minute, with all
labels of some days kept in one integer, so that millions of cases can be compared.
"""

import calendar
import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
RANGES = [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
GAPS, OVERLAPS = ("after", "skip"), ("first", "second", "both")
CHOICES = [(gap, overlap) for gap in GAPS for overlap in OVERLAPS]
DAY, SECOND = timedelta(days=1), timedelta(seconds=1)


def value(text: str) -> int:
    if text in MONTHS:
        return MONTHS.index(text) + 1
    return WEEKDAYS.index(text) if text in WEEKDAYS else int(text)


def expand(item: str, low: int, high: int) -> set[int]:
    """The values of `*`, `a`, `a-b` and their steps."""
    base, _, step = item.partition("/")
    if base == "*":
        first, last = low, high
    elif "-" in base:
        first, last = (value(bound) for bound in base.split("-"))
        if high == 7 and last == 0 < first:
            last = 7
    else:
        first = value(base)
        last = high if step else first
    return set(range(first, last + 1, int(step or 1)))


def weekday(day: date) -> int:
    return day.isoweekday() % 7


@dataclass(frozen=True)
class Rule:
    """A valid expression of five or six fields."""

    text: str

    @functools.cached_property
    def fields(self) -> list[str]:
        fields = self.text.upper().split()
        return fields if len(fields) == 6 else ["0", *fields]

    def values(self, position: int) -> set[int]:
        return set().union(*(expand(item, *RANGES[position]) for item in self.fields[position].split(",")))

    @functools.cached_property
    def times(self) -> list[time]:
        hours, minutes, seconds = (sorted(self.values(position)) for position in (2, 1, 0))
        return [time(hour, minute, second) for hour in hours for minute in minutes for second in seconds]

    @functools.cached_property
    def months(self) -> set[int]:
        return self.values(4)

    @property
    def wildcard(self) -> bool:
        return self.fields[1].startswith("*") or self.fields[2].startswith("*")

    @functools.cached_property
    def both(self) -> bool:
        return any(field.startswith("*") or field == "?" for field in (self.fields[3], self.fields[5]))

    @functools.cached_property
    def dom_items(self) -> list[str]:
        return self.fields[3].replace("?", "*").split(",")

    @functools.cached_property
    def dow_items(self) -> list[str]:
        return self.fields[5].replace("?", "*").split(",")

    def on(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        found = (
            any(_dom_matches(item, day) for item in self.dom_items),
            any(_dow_matches(item, day) for item in self.dow_items),
        )
        return all(found) if self.both else any(found)


@functools.lru_cache(maxsize=200_000)
def _dom_matches(item: str, day: date) -> bool:
    last = calendar.monthrange(day.year, day.month)[1]
    working = [n for n in range(1, last + 1) if day.replace(day=n).weekday() < 5] if item.endswith("W") else []
    if item == "LW":
        return day.day == working[-1]
    if item.startswith("L"):
        return day.day == last - int(item[2:] or 0)
    if item.endswith("W"):
        wanted = int(item[:-1])
        return wanted <= last and day.day == min(working, key=lambda n: abs(n - wanted))
    return day.day in expand(item, 1, 31)


@functools.lru_cache(maxsize=200_000)
def _dow_matches(item: str, day: date) -> bool:
    if "#" in item:
        name, nth = item.split("#")
        return weekday(day) == value(name) % 7 and (day.day - 1) // 7 + 1 == int(nth)
    if item.endswith("L"):
        return weekday(day) == value(item[:-1]) % 7 and (day + 7 * DAY).month != day.month
    return weekday(day) in {n % 7 for n in expand(item, 0, 7)}


# ── instants ────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def changes(zone: str, first: int = 2005, last: int = 2035) -> list[datetime]:
    """The instants at which the offset of a zone changes; no two are within a day of each other."""
    tz, found = ZoneInfo(zone), []
    at, end, step = datetime(first, 1, 1, tzinfo=UTC), datetime(last + 1, 1, 1, tzinfo=UTC), DAY
    while at < end:
        low, high = at, at + step
        if low.astimezone(tz).utcoffset() != high.astimezone(tz).utcoffset():
            while high - low > SECOND:
                middle = low + timedelta(seconds=(high - low) // SECOND // 2)
                same = middle.astimezone(tz).utcoffset() == low.astimezone(tz).utcoffset()
                low, high = (middle, high) if same else (low, middle)
            found.append(high)
        at += step
    return found


def shows(label: datetime, tz: ZoneInfo) -> list[datetime]:
    """The instants at which a clock in the zone shows the label: none in a gap, two in an overlap."""
    candidates = {label.replace(tzinfo=tz, fold=fold).astimezone(UTC) for fold in (0, 1)}
    return sorted(at for at in candidates if at.astimezone(tz).replace(tzinfo=None) == label)


def after_gap(label: datetime, tz: ZoneInfo) -> datetime:
    """The first instant after the gap in which the label lies."""
    early, late = sorted(label.replace(tzinfo=tz, fold=fold).astimezone(UTC) for fold in (0, 1))
    offset = early.astimezone(tz).utcoffset()
    while late - early > SECOND:
        middle = early + timedelta(seconds=(late - early) // SECOND // 2)
        early, late = (middle, late) if middle.astimezone(tz).utcoffset() == offset else (early, middle)
    return late


def instants(label: datetime, tz: ZoneInfo, wildcard: bool, gap: str, overlap: str) -> list[datetime]:
    """When a rule that names this label runs."""
    found = shows(label, tz)
    if wildcard or (found and overlap == "both"):
        return found
    if found:
        return found[:1] if overlap == "first" else found[-1:]
    return [after_gap(label, tz)] if gap == "after" else []


def next_run(
    text: str, zone: str, after: datetime, gap: str = "after", overlap: str = "first", reach: timedelta = DAY
) -> datetime | None:
    """The smallest instant after `after`; `reach` is the largest change of the clocks that may be near."""
    rule, tz = Rule(text), ZoneInfo(zone)
    start = after.astimezone(tz).replace(tzinfo=None) - reach
    best: datetime | None = None
    best_label = datetime.max
    for label in labels(rule, start):
        if best is not None and label > best_label + 2 * reach:
            break
        for at in instants(label, tz, rule.wildcard, gap, overlap):
            if at > after and (best is None or at < best):
                best, best_label = at, label
    return best


def labels(rule: Rule, start: datetime) -> Iterator[datetime]:
    """Matching labels from a local time on, date by date, for 50 years."""
    day, last = start.date(), start.year + 50
    while day.year <= last:
        if rule.on(day):
            for at in rule.times:
                label = datetime.combine(day, at)
                if label >= start:
                    yield label
        day += DAY


# ── around one change, minute by minute ─────────────────────────────────────────────────────────────────────────────


class Night:
    """The minutes of three days on either side of a change. Bit n of an integer is the n-th minute."""

    SIDE = 3 * 1440

    def __init__(self, zone: str, change: datetime) -> None:
        self.zone, self.change = zone, change
        tz, minute = ZoneInfo(zone), timedelta(minutes=1)
        self.start, self.end = change - self.SIDE * minute, change + self.SIDE * minute
        local = [(self.start + n * minute).astimezone(tz).replace(tzinfo=None) for n in range(2 * self.SIDE)]
        self.first_day = min(local[0], local[self.SIDE]).date()
        midnight = datetime.combine(self.first_day, time())
        label = [(shown - midnight) // minute for shown in local]
        self.days = [self.first_day + n * DAY for n in range(max(label) // 1440 + 1)]
        # On either side of the change the clock runs evenly: one shift maps labels to instants.
        self.shift_before, self.shift_after = label[0], label[self.SIDE] - self.SIDE
        assert label[: self.SIDE] == list(range(label[0], label[0] + self.SIDE))
        assert label[self.SIDE :] == list(range(label[self.SIDE], label[self.SIDE] + self.SIDE))
        self.before, self.after = (1 << self.SIDE) - 1, ((1 << self.SIDE) - 1) << self.SIDE
        seen_before, seen_after = set(label[: self.SIDE]), set(label[self.SIDE :])
        self.twice = sum(1 << n for n in seen_before & seen_after)
        self.never = sum(1 << n for n in range(label[0], max(label)) if n not in seen_before and n not in seen_after)

    def _as_instants(self, shown: int) -> tuple[int, int]:
        """Labels to the minutes before and after the change that show them."""
        return (shown >> self.shift_before) & self.before, _shifted(shown, -self.shift_after) & self.after

    def runs(self, rule: Rule) -> dict[tuple[str, str], int]:
        """For each choice the minutes with a run."""
        day = _minutes_of(rule)
        matching = sum(day << (1440 * n) for n, at in enumerate(self.days) if rule.on(at))
        early, late = self._as_instants(matching)
        if rule.wildcard:
            return dict.fromkeys(CHOICES, early | late)
        early_twice, late_twice = self._as_instants(matching & self.twice)
        moved = 1 << self.SIDE if matching & self.never else 0
        return {
            (gap, overlap): (early & ~early_twice if overlap == "second" else early)
            | (late & ~late_twice if overlap == "first" else late)
            | (moved if gap == "after" else 0)
            for gap, overlap in CHOICES
        }

    def next_run(self, runs: int, after: datetime) -> datetime | None:
        """The first of the runs after an instant, or None if these days hold no more."""
        minute = (after - self.start) // timedelta(minutes=1) + 1
        rest = runs >> minute
        return self.start + timedelta(minutes=minute + (rest & -rest).bit_length() - 1) if rest else None

    def previous_run(self, runs: int, before: datetime) -> datetime | None:
        """The last of the runs before an instant, or None if these days hold none."""
        minute = -((self.start - before) // timedelta(minutes=1))
        rest = runs & ((1 << minute) - 1)
        return self.start + timedelta(minutes=rest.bit_length() - 1) if rest else None


@functools.lru_cache(maxsize=10)
def _minutes_of(rule: Rule) -> int:
    return sum(1 << (at.hour * 60 + at.minute) for at in rule.times)


def _shifted(bits: int, by: int) -> int:
    return bits << by if by >= 0 else bits >> -by


# ── random expressions ──────────────────────────────────────────────────────────────────────────────────────────────


def random_field(rng: random.Random, position: int, star: float) -> str:
    """One field in one of its forms, `*` so often."""
    low, high = RANGES[position]
    if rng.random() < star:
        return "*"
    names = {4: ["", *MONTHS], 5: [*WEEKDAYS, "7"]}.get(position)

    def spell(number: int) -> str:
        text = names[number] if names and rng.random() < 0.3 else str(number)
        return text.lower() if rng.random() < 0.3 else text.zfill(rng.choice([1, 1, 1, 2]))

    def item() -> str:
        form = rng.randrange(8)
        first = rng.randint(low, high)
        last = rng.randint(first, high)
        if form <= 2:
            return spell(first)
        if form == 3:
            return f"{spell(first)}-{spell(last)}" if not (position == 5 and last == 7 and first == 0) else "0-7"
        if form == 4:
            return f"{first}-{last}/{rng.randint(1, high)}"
        if form == 5:
            return f"{first}/{rng.randint(1, high)}"
        return f"*/{rng.randint(1, high)}"

    return ",".join(item() for _ in range(rng.choice([1, 1, 1, 2, 3])))


def random_dom(rng: random.Random) -> str:
    forms = [
        "L",
        f"L-{rng.randint(1, 27)}",
        "LW",
        f"{rng.randint(1, 31)}W",
        f"{rng.randint(1, 31)}",
        "?",
        "15,L",
        "1W,15W",
    ]
    return rng.choice(forms)


def random_dow(rng: random.Random) -> str:
    name = rng.choice([*WEEKDAYS, *"01234567"])
    forms = [f"{name}L", f"{name}#{rng.randint(1, 5)}", f"{name}#1,{rng.choice(WEEKDAYS)}#3", "FRI-SUN", "5-0", "?"]
    return rng.choice(forms)


def random_expression(rng: random.Random, *, modifiers: float = 0.25, seconds: float = 0.1, days: float = 0.5) -> str:
    """A valid expression, as far as one can tell without looking at the calendar."""
    minute, hour = random_field(rng, 1, 0.15), random_field(rng, 2, 0.3)
    dom = random_dom(rng) if rng.random() < modifiers else random_field(rng, 3, days)
    month = random_field(rng, 4, 0.6)
    dow = random_dow(rng) if rng.random() < modifiers else random_field(rng, 5, days)
    fields = [minute, hour, dom, month, dow]
    if rng.random() < seconds:
        fields.insert(0, random_field(rng, 0, 0.2))
    return rng.choice([" ", " ", "  ", "\t"]).join(fields)


def night_expression(rng: random.Random, zone: str, change: datetime) -> str:
    """An expression that names local times close to those that a change leaves out or shows twice."""
    tz = ZoneInfo(zone)
    hours = [(change + timedelta(minutes=by)).astimezone(tz).hour for by in (-61, -1, 0, 59)]
    hour = rng.choice(hours + [n % 24 for n in range(hours[1] + 1, hours[2])])
    minute = rng.choice([random_field(rng, 1, 0.1), "0", "30", "45", "*/15"])
    span = rng.choice(
        [f"{hour}", f"{hour}", f"{hour}-{min(hour + 1, 23)}", f"{hour},{(hour + 9) % 24}", "0-23/2", "*/2"]
    )
    days = rng.choice(["* * *", "* * *", f"* * {weekday(change.astimezone(tz))}", "*/2 * *", "L,1-31/3 * *"])
    return f"{minute} {span} {days}"


def has_a_date(text: str) -> bool:
    """Whether any day of 2000 to 2027 matches: every kind of month is among them."""
    rule = Rule(text)
    return any(
        rule.on(date(year, month, day))
        for year in range(2000, 2028)
        for month in sorted(rule.months)
        for day in range(1, calendar.monthrange(year, month)[1] + 1)
    )


def croniter_is_right(text: str) -> bool:
    """Where croniter reads an expression as this product does: not in what docs/cron.md lists against it."""
    fields = text.upper().split()
    if len(fields) == 6 or re.search("[A-Z?]", fields[2]) or re.search("[#?]|L", fields[4]):
        return False
    ranges = re.findall(r"(\w+)-(\w+)", " ".join(fields))
    return (
        all(value(low) < value(high) for low, high in ranges)
        and not re.search(r"(^|[\s,])\w+/", text)
        and (fields[2] == "*" or fields[4] == "*" or "*" not in fields[2] + fields[4])
    )


def cronsim_is_right(text: str) -> bool:
    """The same for cronsim in UTC: it lacks some forms, reads 5-5/2 as 5/2, and refuses SUN at the end of a range."""
    fields = text.upper().split()
    if len(fields) == 6 or re.search("[?]|L-|[0-9]W", fields[2]) or re.search("[?]|L", fields[4]):
        return False
    ranges = re.findall(r"(\w+)-(\w+)(/?)", " ".join(fields))
    return all(value(low) < value(high) or (low == high and not step) for low, high, step in ranges)
