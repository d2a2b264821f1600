"""The measured part of docs/how-to/order-of-tools.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from textwrap import fill

from suites.clients.limits import LIMITS
from suites.clients.tools import TOOLS
from suites.clients.trial import MODELS, ORDERS, Outcome

BEGIN = "<!-- written by `make clients` -->"
END = "<!-- end -->"


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each tool: in each order the models of which a usable one came, and what it costs."""
    heads = ("tool", "version", "usable before", "usable after", "float16 compute", "Casts", "integer kernels")
    rows = [heads, tuple("---" for _ in heads)]
    for tool in TOOLS.values():
        before, after = (
            [o for o in outcomes if (o.tool, o.order) == (tool.name, order) and o.verdict != "tool"] for order in ORDERS
        )
        if before or after:
            rows.append((tool.name, _version(tool.package), *_cells(before, after)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "–"


def _cells(before: Sequence[Outcome], after: Sequence[Outcome]) -> Iterator[str]:
    for order in (before, after):
        yield f"{sum(o.verdict == 'usable' for o in order)} of {len(order)}"
    usable = [[o for o in order if o.verdict == "usable"] for order in (before, after)]
    yield ", ".join(f"{_mean(o.low for o in order):.0%}" if order else "–" for order in usable)
    yield ", ".join(
        f"{sum(o.casts for o in order)} ({sum(o.casts_alone for o in order)})" if order else "–" for order in usable
    )
    kernels, alone = sum(o.kernels for o in before), sum(o.kernels_alone for o in before)
    yield f"{kernels} of {alone}" if alone else "–"


def _mean(numbers: Iterable[float]) -> float:
    values = list(numbers)
    return sum(values) / len(values)


def limits() -> str:
    """A line for each limit."""
    lines: dict[str, str] = {}
    for limit in LIMITS:
        orders = {known.order for known in LIMITS if known.why == limit.why}
        when = " or ".join(order for order in ORDERS if order in orders)
        models = f", {', '.join(f'`{name}`' for name in sorted(limit.models))}" if limit.models else ""
        lines[limit.why] = f"- {' and '.join(limit.tools)} {when} the conversion{models}: {limit.why}"
    return "\n".join(fill(line, 118, subsequent_indent="  ", break_long_words=False) for line in lines.values())


def write(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Replace the measured part of a page."""
    text = page.read_text("utf-8")
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n\n{table(outcomes)}\n\n{limits()}\n\n{END}{tail}", "utf-8")


def complete(outcomes: Iterable[Outcome]) -> bool:
    """True if every tool ran on every model in every order."""
    keys = {(o.tool, o.model, o.order) for o in outcomes}
    return len(keys) == len(TOOLS) * len(MODELS) * len(ORDERS)
