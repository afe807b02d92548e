"""Troubles of the periodic work are told, and do not fill the log."""

from __future__ import annotations

from keylane.metaserver.troubles import Troubles


def test_trouble_is_told_ever_more_seldom_when_it_lasts():
    """Met twice a second for an hour: at once, after 10, 30, 70, 150, 310, 630 s, and then every 10 minutes."""
    troubles = Troubles()
    told = [at / 2 for at in range(7_200) if troubles.is_told("no answer", at / 2)]
    assert told == [0, 10, 30, 70, 150, 310, 630, 1_230, 1_830, 2_430, 3_030]


def test_troubles_are_told_apart_and_anew_when_they_come_again():
    troubles = Troubles()
    assert troubles.is_told("no answer", 0)
    assert troubles.is_told("the disk is full", 1)
    assert not troubles.is_told("no answer", 2)
    assert troubles.is_told("no answer", 1_000)
    assert not troubles.is_told("no answer", 1_009)
    assert troubles.is_told("no answer", 1_010)
