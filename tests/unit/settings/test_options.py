"""The options of a conversion: stated once, shown wherever they are taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from amp_rewrite import convert, repair
from amp_rewrite.settings.config_file import Settings
from amp_rewrite.settings.options import DEFAULTS, Options, Request


def test_each_option_has_a_type_and_a_default() -> None:
    assert DEFAULTS.keys() == Options.__annotations__.keys() == Options.__optional_keys__


@pytest.mark.parametrize("function", [convert, repair])
def test_a_function_that_takes_options_shows_them(function: Callable[..., object]) -> None:
    shown = inspect.signature(function).parameters
    assert {name: shown[name].default for name in DEFAULTS} == DEFAULTS
    assert {name: shown[name].annotation for name in ("to", "fuse")} == {
        "to": "str | DType | Policy",
        "fuse": "str | Fuse",
    }
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in shown.values())


def test_each_option_may_stand_in_a_file_of_settings() -> None:
    assert DEFAULTS.keys() <= vars(Settings()).keys()


def test_what_is_no_option_is_named() -> None:
    with pytest.raises(TypeError) as error:
        Request.of(kep=["op=Softmax"])  # type: ignore[call-arg]
    assert str(error.value) == (
        "unexpected keyword argument 'kep'; the options of a conversion are to, lists, level, target, safety, keep,"
        " lower, io, gray_follows_allow, fuse, opset, placement"
    )
