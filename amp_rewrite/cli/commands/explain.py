"""`amp-rewrite explain`, `report` and `doctor`: reasons, terms and op lists; the state of models and machines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.files import MODEL, check_report, convert_guided, guided_request, is_page, write_file
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.parameters import option
from amp_rewrite.decide.reasons import FINDINGS, KINDS, REASONS, RULES, meaning
from amp_rewrite.errors import advice
from amp_rewrite.reports.render import table
from amp_rewrite.settings.choices import low_type
from amp_rewrite.settings.list_entry import Color, Entry, check_op, parse_name
from amp_rewrite.settings.request import KEYWORDS

if TYPE_CHECKING:
    from amp_rewrite.settings.op_lists import OpLists
    from amp_rewrite.settings.request import Request


@parameters.command(
    click.argument(
        "words",
        metavar="MODEL NODE... | WORD...",
        nargs=-1,
        required=True,
        shell_complete=lambda _ctx, _param, start: [word for word in _words() if word.startswith(start)],
    ),
    parameters.as_json,
    borrowed=(*parameters.reads(*KEYWORDS, *parameters.MEASURED, keys=parameters.FEEDBACK), parameters.SHAPE),
)
def explain(words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Print why NODE gets its type, or what WORD means.

    Reasons are traced back to the op that causes them. MODEL can also be a report. NODE is an op, an op type (Softmax)
    or a pattern (op=Softmax); an input of the model stands for the ops that read it, any other value for the op that
    computes it. With options of `convert`, including data, it explains that conversion.

    WORD is an op type (to print its list entries), a reason, a rule, a fusion or a kind of finding; `lists` and `rules`
    print all of them. --json is only for ops of a MODEL.
    """
    first = words[0]
    if Path(first).is_file() or ("::" not in first and ("/" in first or Path(first).suffix)):
        if len(words) < 2:
            raise click.UsageError(f"NODE is missing; name an op of {first}, an op type or a pattern")
        model, names = MODEL.convert(first, None, click.get_current_context()), words[1:]
    elif as_json:
        raise click.UsageError("--json explains ops of a model; name a model, or leave out --json")
    else:
        terminal.show("\n\n".join(_parts(words, parameters.take_settings(options))))
        return
    from amp_rewrite.reports.sources import is_report, report_in

    shapes, explicit = options.pop("shape"), parameters.explicit(options)
    settings = parameters.take_settings(options)
    if is_report(model):
        from amp_rewrite.reports.explain import explained

        explanation = explained(report_in(model), names)
    else:
        from amp_rewrite.pipeline.convert import explain

        with terminal.stages(model.name, model, quiet=False) as tell:
            converted, _ = convert_guided(model, guided_request(settings, shapes, explicit), tell, quiet=False)
        explanation = explain(converted, *names)
    terminal.show(explanation.to_json() if as_json else explanation.text())


def _parts(words: tuple[str, ...], settings: Request) -> Iterator[str]:
    from amp_rewrite.ir.schema import contrib_schemas

    lists = settings.op_lists.at_level(settings.level)
    ops: list[Entry] = []
    for word in words:
        if word == "lists":
            yield list_table(sorted(lists, key=lambda entry: list(Color).index(entry.color)))
        elif word == "rules":
            facts = {name: described(name) for name in known_names()}
            rows = [(name, fact["tier"], fact["promise"] or fact["words"]) for name, fact in facts.items()]
            yield "\n".join(table(rows, head=("rule", "tier", "meaning"), indent=0))
        elif word in known_words():
            yield rule_page(described(word))
        elif "::" in word or word in _known_ops() or word in contrib_schemas():
            ops += entries_of(lists, word)
        else:
            ways = "`amp-rewrite explain rules` and `explain lists` list them; docs/reference/glossary.md has more"
            hint = advice(word, _words(), ways)
            raise click.UsageError(f"no file, rule or op type {word!r}; {hint}")
    if ops:
        yield list_table(ops)


def _words() -> list[str]:
    return ["lists", "rules", *sorted(known_words()), *sorted(_known_ops())]


def _known_ops() -> set[str]:
    from onnx.defs import get_all_schemas

    return {schema.name for schema in get_all_schemas() if not schema.domain}


# -- rules and reasons ---------------------------------------------------------------------------------------


_WIDTH = 110
_HEADINGS = {"hit": "Smallest model that triggers it", "near": "Closest model that does not trigger it"}


def records() -> dict[str, Any]:
    """Return the records of safety rules and fusions by name, including the names of their cases."""
    from amp_rewrite.rewrite.fusions import FUSIONS

    both: tuple[Any, ...] = (*RULES, *FUSIONS)
    return {name: record for record in both for name in (record.name, *record.pairs)}


def known_names() -> list[str]:
    """Return all names, the strongest tier first and the kinds of findings last."""
    tiers = {id: -reason.strength for id, reason in REASONS.items()}
    tiers.update({record.name: tiers.get(record.reason, 0) for record in records().values()})
    return sorted({**tiers, **dict.fromkeys(KINDS, 0)}, key=lambda name: tiers.get(name, 0))


def known_words() -> set[str]:
    return {*records(), *known_names()}


def described(name: str) -> dict[str, Any]:
    """Return all facts about a rule, fusion, reason or kind of finding."""
    record = records().get(name)
    reason_id = name if record is None else record.reason
    reason = REASONS.get(reason_id)
    fact: dict[str, Any] = {
        "name": name if record is None or name in KINDS else record.name,
        "reason": reason_id,
        "tier": "finding" if reason is None else reason.strength.words,
        "words": KINDS[reason_id] if reason is None else reason.words,
        "docs": f"{FINDINGS}#{name}" if reason is None else reason.docs,
        "promise": "",
        "sections": {},
        "models": {},
    }
    if record is not None:
        fact |= {"docs": record.docs, "promise": record.summary, "sections": record.sections}
        for case in record.pairs:
            which = f": {case}" if len(record.pairs) > 1 else ""
            fact["models"] |= {f"{head}{which}": record.model(end, case) for end, head in _HEADINGS.items()}
    return fact


def rule_page(fact: dict[str, Any]) -> str:
    lines = [f"{fact['name']}: {fact['promise'] or fact['words']}"]
    if fact["promise"]:
        lines.append(f"  in reports  {fact['reason']}: {fact['words']}")
    lines.append(f"  tier        {fact['tier']}")
    means, remedy = meaning(fact["reason"])
    lines += [f"  meaning     {means}"] if means else []
    lines += [f"  what to do  {remedy}"] if remedy else []
    if fact["docs"]:
        lines.append(f"  docs        {fact['docs']}")
    for head, text in fact["sections"].items():
        lines += ["", head, *textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    for head, text in fact["models"].items():
        lines += ["", head, textwrap.indent(text.rstrip(), "  ")]
    return "\n".join(lines)


# -- op lists ------------------------------------------------------------------------------------------------


_WHERE = "lists"


def list_table(entries: Iterable[Entry]) -> str:
    rows = [(e.name, e.color.value, str(e.condition or ""), e.source, e.because) for e in entries]
    return "\n".join(table(rows, head=("op", "color", "when", "source", "because"), indent=0))


def entries_of(lists: OpLists, word: str) -> tuple[Entry, ...]:
    """Return the entries of an op, including the one without a condition; ListError for an unknown op."""
    from amp_rewrite.ir.schema import contrib_schemas

    domain, op_type = parse_name(word, _WHERE)
    entries = lists.entries_of(domain, op_type)
    if not entries:
        check_op(domain, op_type, _WHERE, {*lists.entries, *(parse_name(n, _WHERE) for n in contrib_schemas())})
    complete = entries and entries[-1].condition is None
    return entries if complete else (*entries, lists.otherwise(domain, op_type))


# -- report --------------------------------------------------------------------------------------------------


@parameters.command(
    parameters.model,
    option(
        "--expect",
        "TEXT",
        "Exit with 1 unless this holds: 'compute >= 95%', 'casts <= 4', 'io = float32', 'weights <= 40 MB',"
        " 'ops[Softmax] = float32'; repeatable.",
        multiple=True,
    ),
    parameters.as_json,
    parameters.verbose,
    option("-o --output", "FILE", "Also write the report: .json or .html.", type=parameters.FILE_OUT),
    parameters.flag("--overwrite", "Replace an existing output."),
)
def report(
    model: Path, expect: tuple[str, ...], as_json: bool, verbose: bool, output: Path | None, overwrite: bool
) -> int:
    """Print the inventory of MODEL: ops, types, casts and bytes.

    MODEL can also be a JSON report. With --expect, print the actual value for each expectation, and exit with 1 if one
    fails. With -o page.html, write a page with the graph.
    """
    check_report(output, overwrite=overwrite, inputs=(model,))
    from amp_rewrite.reports.expect import Expectation
    from amp_rewrite.reports.page.page import page_of
    from amp_rewrite.reports.page.report_figures import report_figures
    from amp_rewrite.reports.sources import report_and_view

    expectations = [Expectation.parse(text) for text in expect]
    report, view = report_and_view(model)
    outcomes = [expectation.outcome(report) for expectation in expectations]
    # Only a conversion has a next command.
    terminal.show(report.to_json() if as_json else report.text(verbose=verbose, command=""))
    if output is not None:
        html = is_page(output)
        text = page_of(report.brief, report_figures(report, view, "")) if html else report.to_json()
        write_file(output, text, "nothing was changed")
        terminal.talk(f"wrote {output}", quiet=False)
    failed = [outcome for outcome in outcomes if not outcome.met]
    if outcomes and not as_json:
        rows = [("failed" if outcome in failed else "met", outcome.expected, outcome.fact) for outcome in outcomes]
        terminal.show("\n".join(["", "expected", *table(rows)]))
    for outcome in failed if as_json else ():
        terminal.talk(f"failed: {outcome}", quiet=False)
    return FINDING if failed else 0


# -- doctor --------------------------------------------------------------------------------------------------


@parameters.command(
    click.argument("model", type=parameters.MODEL, required=False),
    option("--to", "float16|bfloat16|POLICY", "The low type.  [default: MODEL's low type, else float16]"),
    parameters.as_json,
)
def doctor(model: Path | None, to: str | None, as_json: bool) -> int:
    """Find obstacles to fast half precision, here or in MODEL.

    Check the GPU, the driver, libraries and onnxruntime; exit with 1 if half precision cannot be fast. For a MODEL,
    list the ops that would run on the CPU, the dimensions that do not suit tensor cores, and the options for a session.
    For a half-precision MODEL, also list the ops that a conversion would keep in float32. Values are not checked; use
    `verify` to compare them. On a machine without a GPU, the exit code depends only on MODEL.
    """
    from amp_rewrite.deploy.doctor import doctor

    checkup = doctor(model, to=low_type(to) if to else None)
    terminal.show(checkup.to_json() if as_json else checkup.text())
    return 0 if checkup.well else FINDING
