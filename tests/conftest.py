"""Settings of all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

for number, default in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup, or in the background of a shell; children inherit it
        signal.signal(number, default)

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
