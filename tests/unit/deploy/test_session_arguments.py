"""The environment of a Session: the words that ask for a conversion even without a gain in speed."""

from __future__ import annotations

import pytest

from amp_rewrite.deploy.session.arguments import IGNORE_PERFORMANCE, stated_by
from amp_rewrite.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "asked"),
    [
        *((word, True) for word in ("1", "true", "True", "yes", " on ")),
        *((word, False) for word in ("", "0", "false", "FALSE", "no", "off")),
    ],
)
def test_a_word_of_the_environment_is_yes_or_no(word: str, asked: bool) -> None:
    assert stated_by({IGNORE_PERFORMANCE: word}) is asked


def test_without_the_variable_nothing_is_asked_and_another_word_is_an_error() -> None:
    assert stated_by({}) is False
    with pytest.raises(ConfigError, match="is 'perhaps'; set it to 1 or 0"):
        stated_by({IGNORE_PERFORMANCE: "perhaps"})
