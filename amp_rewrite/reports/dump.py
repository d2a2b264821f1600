"""A record of a conversion in a folder: reports of the model before and after, and the four lists as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amp_rewrite.errors import ConfigError
from amp_rewrite.files.scratch import write_whole
from amp_rewrite.settings.list_entry import Color

if TYPE_CHECKING:
    from amp_rewrite.reports.report import Report
    from amp_rewrite.settings.op_lists import OpLists


def dump(folder: Path, before: Report, after: Report, lists: OpLists) -> tuple[Path, ...]:
    """Write `NAME.before.json`, `NAME.after.json` and `NAME.paintbuckets.txt`; return their paths.

    NAME is the stem of the model's name, "model" without one. The function creates the folder if needed; it
    replaces files of an earlier run with the same name, and a link there, never its target. ConfigError if the folder
    cannot be written.
    """
    stem = Path(after.model.name).stem or "model"
    texts = {
        f"{stem}.before.json": before.to_json(),
        f"{stem}.after.json": after.to_json(),
        f"{stem}.paintbuckets.txt": paint_buckets(lists),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text.encode())
    except OSError as error:
        advice = "name a folder that can be written in AMP_REWRITE_LOG_PATH, or unset it"
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); {advice}") from error
    return tuple(folder / name for name in texts)


def paint_buckets(lists: OpLists) -> str:
    """Return the four lists as text: a heading for each, one op per line."""
    buckets = ((color, lists.ops(color)) for color in Color if color is not Color.UNLISTED)
    return "\n".join(
        "".join(f"{line}\n" for line in (f"{color.value}:", *(f"  {op}" for op in ops))) for color, ops in buckets
    )
