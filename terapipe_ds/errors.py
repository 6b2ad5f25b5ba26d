"""The errors that terapipe-ds raises.

Every message is one line that says what was found, what is allowed and which setting to change.
"""

from __future__ import annotations


class TeraPipeError(RuntimeError):
    """Base of every error that this package raises on purpose."""


class ConfigError(TeraPipeError, ValueError):
    """A setting has an impossible value, or asks for something that cannot be sliced correctly."""


class ScheduleError(TeraPipeError):
    """An order of slices breaks a rule; the message carries the stage x step grid."""


class DataIteratorEnded(TeraPipeError, StopIteration):
    """The data iterator ended inside a step; raised on every rank.

    Also a ``StopIteration``, which stock DeepSpeed raises (on the loading ranks only). Inside a
    generator Python therefore turns it into a ``RuntimeError``.
    """


class RankFailure(TeraPipeError):
    """A peer was lost or a wait took longer than ``terapipe.timeout_s``."""
