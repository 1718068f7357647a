"""Strategies whose servers tell of every request that they get."""

from __future__ import annotations


def watched(cls, note):
    """The strategy; `note(strategy, request)` comes before each request that one of its servers deals with."""

    class Watched(cls):
        def __init__(self, *args, **given):
            super().__init__(*args, **given)
            if self.place.children:
                self._receive, self.loop.handler.receive = self.loop.handler.receive, self._note

        def _note(self, request):
            note(self, request)
            self._receive(request)

    return Watched
