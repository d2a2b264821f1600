"""Arguments of a session: checks, and their resolved values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from amp_rewrite.deploy.session.cache import Cache
from amp_rewrite.errors import ConfigError, PolicyError
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.runtime.runner import CPU, CUDA, MOST_THREADS, TENSORRT, has_provider
from amp_rewrite.settings.option import check_keyword

Provider = str | tuple[str, Mapping[str, object]]

IGNORE_PERFORMANCE = "AMP_REWRITE_IGNORE_PERFORMANCE"
_OWN = ("model", "to", "folder", "data")  # arguments of convert that a Session settles itself, or cannot cache
_WORDS = {"": False, "0": False, "false": False, "no": False, "off": False}
_WORDS |= {"1": True, "true": True, "yes": True, "on": True}


def check_options(options: Mapping[str, object]) -> None:
    """Raise TypeError, as Python does, for an option that `convert` does not have."""
    known = [name for name in signature(convert).parameters if name not in _OWN]
    for name in options:
        if name not in known:
            raise TypeError(f"Session() got an unexpected keyword argument {name!r}; convert takes {', '.join(known)}")


def check_words(*, threads: int, providers: object, **switches: object) -> None:
    """Raise PolicyError for arguments of a wrong type or value."""
    check_keyword("threads", threads, "int")
    for name, value in switches.items():
        check_keyword(name, value, "bool | None")
    if not 0 <= threads <= MOST_THREADS:
        raise PolicyError(
            f"threads is {threads!r}; give how many may work on one op, at most {MOST_THREADS}, or 0 for one per core"
        )
    if isinstance(providers, str):
        raise PolicyError(f"providers is the text {providers!r}; give a list, as in [{providers!r}]")


def resolved_providers(providers: Sequence[Provider] | None) -> tuple[tuple[str, Mapping[str, str]], ...]:
    """Return the providers with their options; by default CUDA first if this onnxruntime is built with it."""
    named = providers if providers is not None else ((CUDA, CPU) if has_provider(CUDA) else (CPU,))
    if not named:
        raise PolicyError("providers is empty; leave it out, or name at least CPUExecutionProvider")
    return tuple(_pair(provider) for provider in named)


def _pair(provider: Any) -> tuple[str, Mapping[str, str]]:
    pair = isinstance(provider, (tuple, list)) and len(provider) == 2
    name, options = provider if pair else (provider, {})
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise PolicyError(
            f"{provider!r} is not a provider; name one, as in {CPU!r}, or add options, as in ({CPU!r}, {{}})"
        )
    return name, {key: str(value) for key, value in options.items()}


def provider_settings(
    providers: Sequence[tuple[str, Mapping[str, str]]], device: int, tf32: bool, cuda_graph: bool, free: bool
) -> dict[str, dict[str, str]]:
    """Return options by provider (docs/how-to/session.md); the caller's win. `free`: an input has a free dimension."""
    own = {
        CUDA: {
            "device_id": str(device),
            "use_tf32": str(int(tf32)),
            "cudnn_conv_use_max_workspace": "1",
            "cudnn_conv_algo_search": "HEURISTIC" if free else "EXHAUSTIVE",
            "enable_cuda_graph": str(int(cuda_graph)),
        },
        TENSORRT: {"device_id": str(device)},
    }
    return {name: {**own.get(name, {}), **options} for name, options in providers}


def chosen_cache(cache: Cache | str | Path | bool | None) -> tuple[Cache | None, str]:
    """Return the cache for converted models, or the reason why the user has none. PolicyError for another value."""
    if isinstance(cache, (str, Path)) and str(cache):
        return Cache(Path(cache)), ""
    if cache is None or cache is False or isinstance(cache, Cache):
        return cache or None, ""
    if cache is not True:
        raise PolicyError(f"cache is {cache!r}; give a folder, a Cache, True for the user's own, or None")
    try:
        return Cache.usual(os.environ), ""
    except ConfigError as cause:
        return None, str(cause)


def stated_by(environ: Mapping[str, str]) -> bool:
    """True if the environment requests conversion even without a speed gain. ConfigError for an unknown word."""
    word = environ.get(IGNORE_PERFORMANCE, "")
    if word.strip().lower() not in _WORDS:
        raise ConfigError(f"{IGNORE_PERFORMANCE} is {word!r}; set it to 1 or 0")
    return _WORDS[word.strip().lower()]
