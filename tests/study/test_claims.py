"""Claims and their verdicts."""

from __future__ import annotations

import pytest

from hpcdist.tools.study.claims import Claim, paragraphs, verdict


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([True, True], "SHOWN"),
        ([True, False], "SHOWN IN PART"),
        ([False], "NOT SHOWN"),
        ([], "NOT RUN"),
    ],
)
def test_a_verdict_is_of_all_parts(parts, expected):
    assert verdict(parts) == expected


def test_claims_are_numbered_and_fit_on_lines():
    first, second = paragraphs([Claim("It grows.", [True], "From 1 to 2."), Claim("It ends.", [False], "1 " * 100)])
    assert first == "1. It grows. SHOWN. From 1 to 2."
    assert second.startswith("2. It ends. NOT SHOWN. 1 1") and max(map(len, second.splitlines())) <= 120
