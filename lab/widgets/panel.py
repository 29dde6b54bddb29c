"""The live panel: a game played by a model, with its answer, times and question beside it.

Play runs in a thread (`lab.player`); what is drawn is a picture, at most 24 times a second, and text, at most ten times.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as w

from lab.errors import InputError
from lab.live_choices import DEFAULT_SOURCE, SNAKE, check_settings, choices, is_snake, sources
from lab.live_views import DIM, bars, numbers, strip
from lab.moments import check_gif_path, encode, picture_format
from lab.player import SPEED, Player
from lab.widgets import stop
from lab.workloads import MAX_FRAMES, Question

HERE = Path(__file__).parent
PICTURE_S, TEXT_S = 1 / 24, 1 / 10
SPEEDS = [*((f"{speed}/s", float(speed)) for speed in (1, 2, 5, 10, 20, 30, 60)), ("fastest", math.inf)]
TOLD = {
    False: "Pause, then type: the bars move as you do, over the same picture; red lines are the answer before. Try to swap "
    "what two options say. Words that a model was not trained on move it in ways that need not make sense, or not at all.",
    True: "Pause, then type: the bars move as you do, over the same board; red lines are the answer before. What stands "
    "beside the options is the planner's, new for every board; the shield lets only safe moves pass, whatever is asked.",
}  # by whether the game is Snake
KEYS = [("space", "play or pause"), ("s →", "step"), ("←", "back"), ("r", "restart"), ("+ −", "speed")]


class Keys(anywidget.AnyWidget):
    """Hears keys pressed in the panel that it stands in; shows nothing."""

    _esm = (HERE / "panel.js").read_text(encoding="utf-8")
    _css = (HERE / "panel.css").read_text(encoding="utf-8")


class Panel(w.VBox):
    """A live panel on `lab.live.Session(**settings)`; plays at once where `playing`.

    `player` is what plays and can be driven from other cells: `panel.player.pause()`, `.step()`, `.ask(question)`.
    `close()` frees the emulator and takes the panel away; running its cell again, Jupyter's stop button and the end of the
    kernel are heard too. Raises InputError for settings that cannot be; what fails later is said in the panel.
    """

    def __init__(self, playing: bool = True, speed: float = SPEED, **settings: Any):
        source = settings.get("source", DEFAULT_SOURCE)
        known = {"source": source, **_usual(source), "device": "cpu", "dtype": "fp32", "choose": "greedy", "seed": 0}
        settings = known | settings
        check_settings(*(settings[key] for key in ("step", "frames", "seed")), source=source)
        self._own, self._due = threading.local(), {"picture": 0.0, "text": 0.0}
        self._kept = {is_snake(game): _usual(game) for game in (DEFAULT_SOURCE, SNAKE)}  # a choice for each kind
        self._kept[is_snake(source)] = {name: settings[name] for name in ("model", "step", "frames")}
        self._format, self._names, self._begun = None, None, False
        super().__init__([*self._face(speed), self._drawers(settings)])
        self.add_class("refrain-panel")
        self.player = Player(settings, self._show, playing, speed)
        stop.watch(self)

    # ---------------------------------------------------------------------------------------------- what it is made of

    def _face(self, speed: float) -> list[w.Widget]:
        self._head, self._note = w.HTML(), w.HTML()
        self._image = _named(w.Image(value=b""), "refrain-frame", "refrain-hide")
        self._asked, self._bars = _named(w.HTML(), "refrain-question"), _named(w.HTML(), "refrain-bars")
        self._numbers = _named(w.HTML(), "refrain-numbers")
        screen = _named(w.HBox([self._image]), "refrain-screen")
        answer = _named(w.VBox([self._asked, self._bars, self._numbers]), "refrain-answer")
        self._play = _button("Play", "play", "refrain-play", self._play_or_pause)
        self._step = _button("Step", "step-forward", "refrain-step", lambda: self.player.step())
        self._restart = _button("Restart", "refresh", "refrain-restart", lambda: self.player.restart())
        self._speed = w.SelectionSlider(
            options=SPEEDS, value=_speed(speed), description="speed", continuous_update=True
        )
        self._speed.layout.width = "320px"
        self._speed.observe(self._heard(lambda value: self.player.set_speed(value)), "value")
        self._shut = _button("Close", "times", "refrain-close", lambda: self.player.close())
        self._keys = Keys()
        self._keys.on_msg(lambda _, content, __: self._key(content.get("key")))
        buttons = [self._play, self._step, self._restart, _named(self._speed, "refrain-speed"), self._shut]
        keys = "&ensp;".join(f"<kbd>{escape(key)}</kbd> {what}" for key, what in KEYS)
        hint = (
            f'<span style="font-size:12px;{DIM}"><span class="refrain-keys-on">keys are on: {keys}</span>'
            f'<span class="refrain-keys-off">click the picture, and keys work: {keys}</span></span>'
        )
        return [
            _named(self._head, "refrain-head"),
            _named(self._note, "refrain-note"),
            _named(w.HBox([screen, answer]), "refrain-body"),
            _named(w.HBox(buttons), "refrain-controls"),
            w.HBox([w.HTML(hint), self._keys]),
        ]

    def _drawers(self, settings: dict) -> w.Widget:
        games = list(dict.fromkeys([*sources(), settings["source"]]))
        self._chosen = {
            "source": w.Dropdown(options=_pairs(*games), description="game"),
            "model": w.Dropdown(description="model"),
            "step": w.Dropdown(description="step"),
            "device": w.Dropdown(options=_pairs("cpu", "cuda"), description="device"),
            "dtype": w.Dropdown(options=_pairs("fp32", "bf16"), description="dtype"),
            "frames": w.Dropdown(options=_pairs(*range(1, MAX_FRAMES + 1)), description="frames"),
            "choose": w.Dropdown(options=_pairs("greedy", "sampled"), description="choose"),
            "seed": w.BoundedIntText(settings["seed"], min=0, max=2**31 - 1, description="seed"),
        }
        for name, field in self._chosen.items():
            _named(field, f"refrain-{name}").observe(
                self._heard(lambda value, name=name: self._set(name, value)), "value"
            )
            field.layout.width = "270px"
        self._offer(settings)
        self._instructions = _named(w.Textarea(rows=3, continuous_update=True), "refrain-instructions")
        self._instructions.layout.width = "98%"
        self._options = _named(w.Box(), "refrain-options")
        self._texts: dict[str, w.Text] = {}
        self._instructions.observe(self._heard(lambda _: self._typed()), "value")
        ask = _button("Ask this", "question", "refrain-ask", lambda: self._typed(now=True))
        original = _button("Original question", "undo", "refrain-original", self._original)
        self._told = w.HTML()
        self._place = w.IntSlider(0, 0, 0, description="decision", continuous_update=True, readout=False)
        self._place.layout.width = "420px"
        self._place.observe(self._heard(lambda value: self.player.view(value)), "value")
        self._episode = w.Dropdown(options=[("none yet", None)], description="episode")
        self._episode.observe(self._heard(self._jump), "value")
        self._where, self._saved = w.HTML(), w.HTML()
        self._path = w.Text("play.gif", description="file", continuous_update=False)
        save = _button("Save as GIF", "save", "refrain-save", lambda: self.player.do(self._save))
        seek = [_named(self._episode, "refrain-episode"), _named(self._place, "refrain-scrub"), self._where]
        keep = [_named(self._path, "refrain-path"), save, self._saved]
        tabs = w.Accordion(
            [
                _named(w.HBox(list(self._chosen.values())), "refrain-row"),
                w.VBox([self._told, self._instructions, self._options, _named(w.HBox([ask, original]), "refrain-row")]),
                w.VBox([_named(w.HBox(seek), "refrain-row"), _named(w.HBox(keep), "refrain-row")]),
            ],
            titles=("Game, model, step", "Change the question", "Replay and save"),
            selected_index=None,
        )  # fmt: skip
        return _named(tabs, "refrain-drawers")

    def _offer(self, settings: dict) -> None:
        """Let the fields show what is played with, and what else the game could be played with."""
        offered = dict(zip(("model", "step"), choices(settings["source"]), strict=True))
        with self._quietly():
            for name, field in self._chosen.items():
                value = settings[name]
                if isinstance(field, w.Dropdown):
                    options = _pairs(*offered.get(name, (known for _, known in field.options)), value)
                    if options != field.options:
                        field.options = options
                if field.value != value:
                    field.value = value
        self._chosen["frames"].layout.display = "none" if is_snake(settings["source"]) else None

    # ---------------------------------------------------------------------------------------------- what is asked of it

    def _heard(self, act):
        """An observer that acts on a change made by hand, and not on those made here."""
        return lambda change: None if getattr(self._own, "quiet", False) else act(change["new"])

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Changes made in this thread are not by hand; in another one somebody may use a field at the same time."""
        self._own.quiet = True
        try:
            yield
        finally:
            self._own.quiet = False

    def _play_or_pause(self) -> None:
        """What the button says: while a game starts that will play by itself, a press on Play must not pause it."""
        (self.player.pause if self._play.description == "Pause" else self.player.play)()

    def _key(self, name: str | None) -> None:
        if name in ("toggle", "step", "back", "restart"):
            getattr(self.player, name)()
        elif name in ("faster", "slower"):
            place = self._speed.index + (1 if name == "faster" else -1)
            self._speed.index = min(max(place, 0), len(SPEEDS) - 1)

    def _set(self, name: str, value: Any) -> None:
        changes = {name: value}
        if name == "seed":
            self.player.restart(value)
            return
        if name == "source":  # models that read text go with Snake, those that look at pictures with every other game
            changes |= self._kept[is_snake(value)]
        elif name in ("model", "step", "frames"):
            self._kept[is_snake(self._chosen["source"].value)][name] = value
        self.player.change(**changes)

    def _typed(self, now: bool = False) -> None:
        session = self.player.session
        if session is None:
            return
        texts = {name: field.value for name, field in self._texts.items()}
        try:
            self.player.ask(Question(session.question.type, self._instructions.value, texts), typing=not now)
        except InputError as error:
            self._say(str(error))

    def _original(self) -> None:
        def ask(player: Player) -> None:
            if player.session is not None:
                question = player.session.usual_question()
                with self._quietly():
                    self._fill(question)
                player.ask(question)

        self.player.do(ask)

    def _jump(self, number: int | None) -> None:
        def seek(player: Player) -> None:
            places = player.session.recording.episodes().get(number) if player.session else None
            if places:
                player.view(places.start)

        self.player.do(seek)

    def _save(self, player: Player) -> None:
        try:
            path = check_gif_path(self._path.value)
            if player.session is None:
                raise InputError("There is nothing to save yet.")
            recording = player.session.recording
            seen = None if player.moment is None else player.moment.episode
            count = recording.save_gif(path, recording.episodes().get(seen))
            self._saved.value = f"saved {count} pictures, {path.stat().st_size / 1e3:.0f} kB, in {escape(str(path))}"
        except InputError as error:
            self._saved.value = escape(str(error))

    def close(self) -> None:
        """Stop the play, free the emulator, and take the panel away."""
        if getattr(self, "player", None) is not None:
            self.player.close()
        super().close()

    # ---------------------------------------------------------------------------------------------- drawing

    def _show(self, player: Player, urgent: bool) -> None:
        """Draw what has changed; in the player's thread."""
        if not hasattr(self, "player"):
            self.player = player  # its thread may be faster than __init__
        start = time.perf_counter()
        drawn = player.moment is not None and self._is_due("picture", PICTURE_S, start, urgent)
        if drawn:
            frame = player.moment.frame
            if urgent or self._format is None:
                self._format = picture_format(frame)
            self._image.format, self._image.value = self._format, encode(frame, self._format)
        if self._is_due("text", TEXT_S, start, urgent):
            self._write(player)
            if urgent:
                self._arrange(player)
        if drawn and not urgent:
            player.draw_ms.add(1e3 * (time.perf_counter() - start))

    def _is_due(self, what: str, every: float, now: float, urgent: bool) -> bool:
        if not urgent and now < self._due[what]:
            return False
        self._due[what] = max(self._due[what] + every, now)
        return True

    def _write(self, player: Player) -> None:
        session, moment = player.session, player.moment
        if session is None or moment is None:
            return
        facts = session.facts()
        self._bars.value = bars(moment, player.before, facts["taken"])
        self._numbers.value = numbers(moment, facts, player.draw_ms.percentiles(last=200).get("p50"))

    def _arrange(self, player: Player) -> None:
        """What changes only when something was asked for: state, buttons, question, recording."""
        session, state = player.session, player.state
        self._head.value = _head(player)
        self._say(player.message or (session.remark() if session else ""), state)
        playing, closed = state == "playing", state == "closed"
        if playing and not self._begun:
            self._begun = True
            self._keys.send({"begins": True})
        self._play.description, self._play.icon = ("Pause", "pause") if playing else ("Play", "play")
        for widget in (self._play, self._step, self._restart, self._speed, self._shut, *self._chosen.values()):
            widget.disabled = closed
        self._offer(player.settings)
        if player.moment is not None:
            self._image.remove_class("refrain-hide")
        if session is None:
            return
        self._asked.value = f'<div style="font-size:12px;{DIM}">{escape(session.question.instructions)}</div>'
        if self._names != (session.source, session.question.names):
            snake = is_snake(session.source)
            self._told.value = f'<span style="font-size:12px;{DIM}">{TOLD[snake]}</span>'
            self._options.layout.display = "none" if snake else None
            with self._quietly():
                self._fill(session.question)
            self._names = (session.source, session.question.names)
        if not playing:
            self._look_back(player)

    def _fill(self, question: Question) -> None:
        self._instructions.value = question.instructions
        if list(self._texts) != question.names:
            style = {"description_width": "130px"}
            self._texts = {name: w.Text(description=name, style=style) for name in question.names}
            for field in self._texts.values():
                field.layout.width = "330px"
                field.observe(self._heard(lambda _: self._typed()), "value")
            self._options.children = tuple(self._texts.values())
        for name, text in question.options:
            self._texts[name].value = text

    def _look_back(self, player: Player) -> None:
        recording, moment = player.session.recording, player.moment
        episodes = recording.episodes()
        with self._quietly():
            self._place.max = max(len(recording) - 1, 0)
            self._place.value = self._place.max if player.place is None else player.place
            kept = [(f"{number + 1}: {len(places)} decisions", number) for number, places in episodes.items()]
            self._episode.options = kept or [("none yet", None)]
            if moment is not None and moment.episode in episodes:
                self._episode.value = moment.episode
        if player.place is not None:
            done = f"{moment.action}, reward {moment.reward:g}" + (", the episode's last" if moment.over else "")
            self._where.value = f"decision {moment.number}: {done}"
        else:
            self._where.value = f"{len(recording)} kept"

    def _say(self, text: str, state: str = "") -> None:
        colour = "#d55e00" if state == "failed" else "#e69f00"
        self._note.value = f'<div style="font-size:12px;color:{colour}">{escape(text)}</div>' if text else ""

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        session = self.player.session
        still = "A live panel: open the notebook in JupyterLab and run this cell."
        if session is not None and len(session.recording):
            still = strip(session.recording.spread(4), session.facts(), session.title, session.remark()).html
        data["text/html"] = f"<div>{still}</div>"
        return bundle


def _head(player: Player) -> str:
    session, settings = player.session, player.settings
    model = getattr(session.model if session else settings["model"], "name", settings["model"])
    step = session.step.name if session else settings["step"]
    where = f"{settings['device']} {settings['dtype']}"
    if session:
        where = f"{session.model.device.type} {session.model.dtype_name}"
    frames = f", {settings['frames']} frames" if settings["frames"] > 1 else ""
    about = f"{model} · {step}{frames} · {where} · {settings['choose']} · seed {settings['seed']}"
    colour = {"playing": "#009e73", "failed": "#d55e00", "interrupted": "#e69f00"}.get(player.state, "#808080")
    start = sum(session.start_s.values()) if session else 0.0
    began = f" · started in {start:.1f} s" if start else ""
    return (
        f'<div style="display:flex;gap:10px;align-items:baseline;font-size:13px"><b>{escape(settings["source"])}</b>'
        f'<span style="{DIM};font-size:12px">{escape(about)}{began}</span><span style="flex:1"></span>'
        f'<span class="refrain-state" style="color:{colour};white-space:nowrap">● {player.state}</span></div>'
    )


def _usual(source: str) -> dict[str, Any]:
    """What a game is played with where nothing else is asked for."""
    (model, *_), (step, *_) = choices(source)
    return {"model": model, "step": step, "frames": 1}


def _pairs(*values: Any) -> tuple[tuple[str, Any], ...]:
    """Options of a field: each value once, under its name."""
    return tuple((str(getattr(value, "name", value)), value) for value in dict.fromkeys(values))


def _speed(speed: float) -> float:
    """The nearest speed that can be chosen."""
    return min((value for _, value in SPEEDS), key=lambda value: abs(value - speed) if value != speed else -1)


def _named(widget, *classes: str):
    for name in classes:
        widget.add_class(name)
    return widget


def _button(text: str, icon: str, name: str, act) -> w.Button:
    button = _named(w.Button(description=text, icon=icon), name)
    button.on_click(lambda _: act())
    return button
