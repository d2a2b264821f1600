"""`amp-rewrite explain`: the reasons behind the types of ops, and the words and lists that they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import op_lists, parameters, rules, terminal
from amp_rewrite.cli.completion import ops as known_ops
from amp_rewrite.cli.data import MeasuringOptions
from amp_rewrite.cli.files import MODEL
from amp_rewrite.errors import advice
from amp_rewrite.settings.list_entry import Entry

_TOPICS = ("lists", "rules")


@parameters.command(
    parameters.argument("words", metavar="[MODEL NODE... | WORD...]", nargs=-1, choices=lambda _ctx: _known()),
    *parameters.CONVERSION,
    *parameters.MEASURING,
    parameters.as_json,
    parameters.config,
    parameters.keys(*parameters.CONVERSION_KEYS, *parameters.MEASURING_KEYS),
)
def explain(words: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Print why NODE gets its type, back to the op that decides; or what WORD means.

    MODEL may also be a report. NODE is an op, a type of ops (Softmax) or a pattern (op=Softmax); an input of the model
    stands for the ops that read it, another value for the op that computes it. Options of `convert`, including those
    for data, explain what `convert` would do with them.

    WORD is a type of ops, whose lists are printed; a reason, rule, fusion or kind of finding; `lists` or `rules`, for
    all of them. Without words, print a summary of the lists.
    """
    first = words[0] if words else ""
    if first == "-" or Path(first).is_file() or ("::" not in first and ("/" in first or Path(first).suffix)):
        if len(words) < 2:
            raise click.UsageError(f"name an op of {first}, a type of ops or a pattern")
        _explain_ops(MODEL.convert(first, None, click.get_current_context()), words[1:], as_json, given)
        return
    parts = list(_parts(words, given))
    if as_json:
        facts = [fact for _, each in parts for fact in each]
        terminal.show(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        terminal.show("\n\n".join(text for text, _ in parts))


def _explain_ops(model: Path, names: tuple[str, ...], as_json: bool, given: dict[str, Any]) -> None:
    from amp_rewrite.reports.sources import is_report, report_in

    measuring = MeasuringOptions.taken(given)
    settings = parameters.in_force(given)
    if is_report(model):
        from amp_rewrite.reports.explain import explained

        explanation = explained(report_in(model), names)
    else:
        from amp_rewrite.pipeline.explain import explain

        with terminal.stages(model.name, quiet=False) as tell:
            converted, _ = measuring.completed(settings).converted(model, parameters.keywords(settings), tell)
        explanation = explain(converted, *names)
    terminal.show(explanation.to_json() if as_json else explanation.text())


def _parts(words: tuple[str, ...], given: dict[str, Any]) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Yield the text about each word, or about all types of ops among them, with the facts in it."""
    from amp_rewrite.ir.schema import contrib_schemas

    settings = parameters.in_force({name: given[name] for name in ("to", "lists", "level", "config")})
    lists = op_lists.lists_in_force(settings)
    if not words:
        yield op_lists.list_summary(lists, settings.to.spelling), op_lists.list_rows(lists)
    ops: list[Entry] = []
    for word in words:
        if word == "lists":
            yield op_lists.lists_by_color(list(lists)), op_lists.list_rows(lists)
        elif word == "rules":
            yield rules.rules_table(), [rules.described(name) for name in rules.known_names()]
        elif word in rules.known_words():
            fact = rules.described(word)
            yield rules.rule_page(fact), [fact]
        elif "::" in word or word in known_ops(word) or word in contrib_schemas():
            ops += op_lists.entries_of(lists, word)
        else:
            hint = advice(word, _known(), "`amp-rewrite explain rules` and `explain lists` name all")
            raise click.UsageError(f"no file, rule or type of ops {word!r}; {hint}")
    if ops:
        yield op_lists.list_table(ops), op_lists.list_rows(ops)


def _known() -> list[str]:
    return [*_TOPICS, *sorted(rules.known_words()), *known_ops("")]
