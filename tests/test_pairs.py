import numpy as np
import pytest
from bs4 import BeautifulSoup

from lab import widgets
from lab.envs import EmulatorMissing, record_frames
from lab.errors import InputError
from lab.experiments.duplicates import changed_pixels
from lab.widgets import frame_pairs as module


def said(explorer) -> str:
    return " ".join(BeautifulSoup(explorer.shown[1].value, "html.parser").get_text(" ").split())


def test_scrubbing_shows_each_frame_beside_the_one_before():
    frames = record_frames("atari:Breakout", 30)
    explorer = widgets.pairs("atari:Breakout", frames=30)
    pictures = set()
    for place in (1, 7, 29):
        explorer.set(frame=place)
        count = changed_pixels(frames[place - 1], frames[place]).sum()
        assert said(explorer).startswith(f"Frame {place} ") and f"; {count} of 33600 pixels changed." in said(explorer)
        pictures.add(bytes(explorer.shown[0].value))
    assert len(pictures) == 3


def test_another_player_and_another_game():
    explorer = widgets.pairs("atari:Breakout", frames=12)
    explorer.set(policy="no_op", frame=5)
    assert said(explorer) == "Frame 5 is the one before again; 0 of 33600 pixels changed."
    explorer.set(game="doom:basic", policy="one_hot", frame=3)
    assert "was not seen before" in said(explorer) and "of 76800 pixels changed" in said(explorer)
    explorer.set(game="atari:Combat")
    assert "several players" in explorer.error


def test_without_emulators_the_recordings_are_shown(monkeypatch):
    def missing(*_):
        raise EmulatorMissing("Atari needs ale-py.")

    monkeypatch.setattr(module, "every_source", missing)
    monkeypatch.setattr(module, "make", missing)
    module.played.cache_clear()
    explorer = widgets.pairs("atari:Pong")
    explorer.set(frame=100)  # beyond the recording's end: its last pair
    recorded = module.recorded_frames("atari:Pong")
    last = len(recorded) - 1
    assert said(explorer).startswith(f"Frame {last} ")
    assert f"; {np.count_nonzero(changed_pixels(*recorded[-2:]))} of" in said(explorer)
    module.played.cache_clear()


@pytest.mark.parametrize(("given", "says"), [({"source": "atari:Pung"}, "Pung"), ({"frames": 1}, "at least 2")])
def test_bad_input_is_named(given, says):
    with pytest.raises(InputError, match=says):
        widgets.pairs(**given)
