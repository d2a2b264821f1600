"""Every error that this package raises on purpose.

    AmpRewriteError
    ├── ModelError         a model cannot be read, is invalid, or cannot be written
    │   └── ConversionError   the converted model failed its own check (a bug in this package)
    ├── ListError          an op list is malformed or contradicts itself
    ├── PatternError       a keep, lower or io pattern is malformed or matches nothing
    ├── PolicyError        an unknown or contradictory precision policy, level or target
    ├── ReportError        a report file cannot be read
    └── ConfigError        a configuration file or environment variable is malformed

Each message names the thing, the fact and the way out.
"""

from __future__ import annotations


class AmpRewriteError(Exception):
    """Base of all errors of this package."""


class ModelError(AmpRewriteError):
    """A model cannot be read, is invalid, or cannot be written."""


class ConversionError(ModelError):
    """The converted model failed its own check; nothing was written."""


class ListError(AmpRewriteError):
    """An op list is malformed or contradicts itself."""


class PatternError(AmpRewriteError):
    """A keep, lower or io pattern is malformed or matches nothing."""


class PolicyError(AmpRewriteError):
    """An unknown or contradictory precision policy, level or target."""


class ReportError(AmpRewriteError):
    """A report file cannot be read."""


class ConfigError(AmpRewriteError):
    """A configuration file or environment variable is malformed."""
