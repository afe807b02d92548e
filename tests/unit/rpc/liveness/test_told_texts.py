"""A trouble that lasts is told once."""

from __future__ import annotations

import logging

from keylane.rpc.liveness.told_texts import TOLD_MAX, ToldTexts


def test_text_is_told_once_until_a_try_succeeds():
    told = ToldTexts()
    texts = ["a", "b", "a", "b", "a"]
    assert [told.level(text) for text in texts] == [logging.INFO] * 2 + [logging.DEBUG] * 3
    told.over()
    assert told.level("a") == logging.INFO


def test_few_texts_are_told_when_each_is_another_one():
    told = ToldTexts()
    levels = [told.level(f"after {number} s") for number in range(10 * TOLD_MAX)]
    assert levels.count(logging.INFO) == TOLD_MAX
