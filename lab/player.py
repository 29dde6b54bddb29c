"""A session that plays in a thread of its own, so that a notebook's other cells go on running. Knows no widgets."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from lab.errors import InputError
from lab.live import Session, Times, open_session
from lab.moments import Moment
from lab.workloads import Question

SPEED = 30.0  # decisions a second, unless more or fewer are asked for; infinity is as many as there can be
TYPING_S = 0.35  # a question is asked this long after its last change
SLOW_START_S = 4.0  # a step that takes longer to build is not built anew while somebody types

_players: "weakref.WeakSet[Player]" = weakref.WeakSet()


class Player:
    """Plays `Session(**settings)` in a daemon thread, from the start where `playing`.

    All methods return at once and may be called in any thread; `interrupt` in a signal handler too. What they ask for is
    done between two decisions. `show(player, urgent)` is called in the player's own thread: after every decision, and
    with `urgent` after everything else. It finds

    - `state`: starting, playing, paused, interrupted, failed or closed; `message`: what to say beside it
    - `session`, None before it is built and where that failed; `moment`, what is to be seen; `before`, the answer to the
      earlier question about the same frame, after a question was changed while play rests
    - `place`: which moment of `session.recording` is seen, None for the present one
    - `speed`, in decisions a second; `draw_ms`, where `show` may note what it takes
    """

    def __init__(
        self,
        settings: dict[str, Any],
        show: Callable[["Player", bool], None] = lambda player, urgent: None,
        playing: bool = True,
        speed: float = SPEED,
    ):
        self.settings, self.show, self.speed = dict(settings), show, speed
        self.state, self.message = "starting", ""
        self.session: Session | None = None
        self.moment: Moment | None = None
        self.before: Moment | None = None
        self.place: int | None = None
        self.draw_ms, self.trouble = Times(), None
        self._wanted, self._due, self._typed = playing, 0.0, None
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._stop, self._interrupted = threading.Event(), threading.Event()
        self._commands.put(lambda: self._open(self.settings))
        self._thread = threading.Thread(target=self._run, name="refrain-player", daemon=True)
        _players.add(self)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- asked for

    def play(self) -> None:
        self._commands.put(self._play)

    def pause(self) -> None:
        self._commands.put(lambda: self._rest("paused"))

    def toggle(self) -> None:
        self._commands.put(lambda: self._rest("paused") if self.state == "playing" else self._play())

    def step(self) -> None:
        """One decision more, or one moment later where the past is seen."""
        self._commands.put(self._step)

    def back(self) -> None:
        """One moment back."""
        self._commands.put(
            lambda: self._view((len(self.session.recording) - 1 if self.place is None else self.place) - 1)
        )

    def view(self, place: int) -> None:
        """Let moment `place` of the recording be seen; play rests."""
        self._commands.put(lambda: self._view(place))

    def restart(self, seed: int | None = None) -> None:
        """From episode 0 again; an emulator or step that failed is built anew."""
        self._commands.put(lambda: self._restart(seed))

    def change(self, **settings: Any) -> None:
        """Play with these settings instead, from episode 0; a loaded model is kept where it stays the same, the question
        where the game does."""
        self._commands.put(lambda: self._change(settings))

    def ask(self, question: Question, typing: bool = False) -> None:
        """Ask another question from now on; with `typing` once nothing more is typed, unless the step is slow to build."""
        if not typing:
            self._commands.put(lambda: self._ask(question))
        else:
            self._typed = (time.monotonic() + TYPING_S, question)
            self._commands.put(lambda: None)

    def set_speed(self, speed: float) -> None:
        self.speed = speed
        self._commands.put(lambda: self._tell(True))

    def do(self, work: Callable[["Player"], None]) -> None:
        """Do something with the session between two decisions."""
        self._commands.put(lambda: work(self))

    def interrupt(self) -> None:
        """Stop playing, as after Jupyter's stop button: the emulator stays, and play goes on when asked."""
        self._interrupted.set()
        self._commands.put(lambda: None)

    def close(self, wait_s: float = 10) -> None:
        """Stop for good and free the emulator; returns when that is done, or after `wait_s`."""
        self._stop.set()
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    # ---------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            command = self._next()
            try:
                if self._interrupted.is_set():
                    self._interrupted.clear()
                    self._wanted = False
                    if self.state == "playing":
                        self._rest("interrupted", "interrupted; press play to go on")
                if command is not None:
                    command()
                elif self._typed and time.monotonic() >= self._typed[0]:
                    (_, question), self._typed = self._typed, None
                    self._ask_typed(question)
                elif self.state == "playing":
                    self._tick()
            except InputError as error:
                self._fail(str(error))
            except Exception as error:  # an emulator that died, a model that cannot run: to be read in the panel
                self._fail(f"{type(error).__name__}: {error}")
        if self.session:
            self.session.close()
        self.state, self.message = "closed", ""
        self._tell(True)

    def _tell(self, urgent: bool) -> None:
        try:
            self.show(self, urgent)
        except Exception as error:  # a page that went away, a kernel that ends: no reason to stop playing
            self.trouble = error

    def _next(self) -> Callable[[], None] | None:
        """The next thing asked for, or None where the next decision, or a typed question, is due."""
        now, due = time.monotonic(), []
        if self.state == "playing":
            due.append(self._due)
        if self._typed:
            due.append(self._typed[0])
        try:
            if not due:
                return self._commands.get()
            return self._commands.get(timeout=wait) if (wait := min(due) - now) > 0 else self._commands.get_nowait()
        except queue.Empty:
            return None

    def _open(self, settings: dict[str, Any]) -> None:
        def say(what: str) -> None:
            self.message = what
            self._tell(True)

        self._wanted = self._wanted or self.state == "playing"
        self.state, self.moment, self.before, self.place, self._typed = "starting", None, None, None, None
        old, self.session = self.session, None
        loaded = None
        if old is not None:
            old.close()
            kind = str(settings.get("source")).startswith("snake:")  # whose models read text
            same = kind == str(self.settings.get("source")).startswith("snake:")
            if same and all(settings.get(key) == self.settings.get(key) for key in ("model", "device", "dtype")):
                loaded = old.model
        self.settings = settings
        self.draw_ms = Times()
        self.session = open_session(**settings | ({} if loaded is None else {"model": loaded}), say=say)
        self.moment, self.message = self.session.look(), ""
        self.state = "paused"
        if self._wanted:
            self._play()
        else:
            self._tell(True)

    def _change(self, changes: dict[str, Any]) -> None:
        settings = self.settings | changes
        if settings.get("source") != self.settings.get("source") and "question" not in changes:
            settings["question"] = None
        self._open(settings)

    def _play(self) -> None:
        self._wanted = True
        if self.session is None:
            self._restart(None)
            return
        self.state, self.message, self.place, self.before = "playing", "", None, None
        self._due = time.monotonic()
        self._tell(True)

    def _rest(self, state: str, message: str = "") -> None:
        self._wanted = False
        if self.session is None:
            return
        self.session.rest()
        self.state, self.message = state, message
        self._tell(True)

    def _tick(self) -> None:
        self.moment = self.session.tick()
        now = time.monotonic()
        self._due = max(self._due + 1 / self.speed, now - 1 / self.speed)
        self._tell(False)

    def _step(self) -> None:
        if self.session is None:
            return
        if self.place is not None and self.place + 1 < len(self.session.recording):
            self._view(self.place + 1)
            return
        self._rest("paused")
        self.place = self.before = None
        self._tick()
        self.session.rest()
        self._tell(True)

    def _view(self, place: int) -> None:
        if self.session is None or not len(self.session.recording):
            return
        self.place, self.before = min(max(place, 0), len(self.session.recording) - 1), None
        self.moment = self.session.recording[self.place]
        self._rest("paused")

    def _restart(self, seed: int | None) -> None:
        if seed is not None:
            self.settings["seed"] = seed
        if self.session is None or self.state == "failed":
            self._open(self.settings)
            return
        self.session.restart(seed)
        self.draw_ms, self.place, self.before = Times(), None, None
        self.moment = self.session.look()
        self._tell(True)

    def _ask_typed(self, question: Question) -> None:
        start = (
            0.0 if self.session is None else sum(self.session.start_s.get(part, 0.0) for part in ("step", "warm_up"))
        )
        if start < SLOW_START_S:
            self._ask(question)
        else:
            self.message = (
                f"This step takes {start:.0f} s to build anew: press Ask when the question is as you want it."
            )
            self._tell(True)

    def _ask(self, question: Question) -> None:
        if self.session is None:
            return
        resting = self.state != "playing"
        if resting and self.before is None:
            self.before = self.session.look()  # the question that was played with, about the frame that is next
        try:
            self.session.ask(question)
        except InputError as error:  # play goes on with the question before
            self.message = str(error)
        else:
            self.settings["question"], self.message, self.place = question, "", None
            if resting:
                self.moment = self.session.look()
        self._tell(True)

    def _fail(self, why: str) -> None:
        if self.session is not None:
            self.session.close()
        self.session, self.state, self.message, self._wanted = None, "failed", why, False
        self._tell(True)


def others_playing() -> str:
    """A sentence where a player plays in this process at the moment: it shares the processor with what is timed now."""
    playing = sum(player.state == "playing" for player in list(_players))
    return f"Taken while {playing} panel(s) played in the same process." if playing else ""


@atexit.register
def close_all(wait_s: float = 10) -> None:
    """Free every player's emulator; done at the end of the program too."""
    for player in list(_players):
        player.close(wait_s)
