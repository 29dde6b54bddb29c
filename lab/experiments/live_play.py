"""Notebook 10 and `lab play`: a model plays, decision by decision; what it chose, how long it took, how the games went."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from lab.errors import InputError
from lab.live import Session
from lab.live_choices import DEFAULT_MODEL, is_snake
from lab.live_views import bars, numbers, strip
from lab.moments import Moment, encode, picture_format
from lab.player import others_playing
from lab.records import RowWriter, beside_rows, clean, join_rows
from lab.views import View

PROFILES = {
    "smoke": {"model": "tiny", "games": ["atari:Breakout"], "decisions": 40},
    "standard": {"model": DEFAULT_MODEL, "games": ["doom:basic", "atari:Breakout"], "decisions": 300},
    "full": {"model": DEFAULT_MODEL, "games": ["doom:basic", "atari:Breakout", "atari:Pong"], "decisions": 2000},
}
SHOWN = 6  # moments of each game that a report shows


def run(
    profile: str = "standard",
    *,
    out: Path | str | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "fp32",
    step: str = "static",
    model: str | None = None,
) -> pd.DataFrame:
    """Play every game of the profile without a panel and return one row per decision.

    Rows are those of `lab.compare` with one arm, the step as it plays (pace "in_loop"), and beside its `ms` the columns
    emulator_ms, draw_ms (picture and text as the panel makes them), episode, action, probability, reward, score and over.
    Lines about them: the start of each game (seconds by part, remark, weights), its episodes, and six moments with their
    pictures, so that rows show again what was played. Raises InputError for an unknown profile, device, dtype or step.
    """
    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    settings, tables, loaded = PROFILES[profile], [], model or PROFILES[profile]["model"]
    for game in settings["games"]:
        with Session(game, loaded, step, device, dtype, seed=seed) as session:
            loaded = session.model
            tables += _rows(session, settings["decisions"], out)
    return join_rows(tables)


def _rows(session: Session, decisions: int, out) -> list[pd.DataFrame]:
    rows, described, kind = [], clean(session.describe()), picture_format(session.look().frame)
    for number in range(decisions):
        moment = session.tick()
        start = time.perf_counter()
        encode(moment.frame, kind), bars(moment), numbers(moment, session.facts())
        drawn = 1e3 * (time.perf_counter() - start)
        rows.append({
            "title": session.source, "arm": session.step.name, "block": number, "order": 0, "phase": "timed",
            "pace": "in_loop", "device": session.model.device.type, "stage": "total", "ms": moment.decision_ms,
            "again": False, "describe": described, "emulator_ms": moment.emulator_ms, "draw_ms": drawn,
            "episode": moment.episode, "action": moment.action, "probability": moment.ranked[0][1],
            "reward": moment.reward, "score": moment.score, "over": moment.over,
        })  # fmt: skip
    if out:
        with RowWriter(out) as writer:
            for row in rows:
                writer.append(row)
    about = {"title": session.source, "model": session.model.name}
    remark = " ".join(filter(None, [session.remark(), others_playing()]))
    lines = [{"kind": "start", "seconds": session.start_s, "weights": session.model.weights, "remark": remark}]
    lines += [{"kind": "episode", **episode._asdict()} for episode in session.episodes]
    lines += [{"kind": "moment", **moment.to_line()} for moment in session.recording.spread(SHOWN)]
    return [pd.DataFrame(clean(rows)), beside_rows([line | about for line in lines], out)]


# ------------------------------------------------------------------------------------------------ rows -> results


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per game: the model, decisions, percentiles of a decision (ms), decisions a second if there were nothing
    else, median emulator and drawing time (ms), seconds to start, whole episodes and their mean score."""
    lines = []
    for title, part in rows.groupby("title", sort=False):
        start, scores = _about(rows, "start", title)[0], [line["score"] for line in _about(rows, "episode", title)]
        lines.append(
            {"game": title, "model": start["model"], "step": part["arm"].iloc[0], "decisions": len(part)}
            | {f"p{q}": float(np.percentile(part["ms"], q)) for q in (50, 95, 99)}
            | {"a second": 1e3 / part["ms"].mean(), "emulator": part["emulator_ms"].median()}
            | {"drawing": part["draw_ms"].median(), "start_s": sum(start["seconds"].values())}
            | {"episodes": len(scores), "mean score": float(np.mean(scores)) if scores else float("nan")}
        )
    return pd.DataFrame(lines)


def moments(rows: pd.DataFrame, title: str) -> list[Moment]:
    """The moments of one game that the rows hold pictures of."""
    return [Moment.from_line(line) for line in _about(rows, "moment", title)]


def view(rows: pd.DataFrame, title: str) -> View:
    """The panel's picture, bars and numbers as a strip of moments, which needs no panel."""
    part, start = rows[rows["title"] == title], _about(rows, "start", title)[0]
    facts = {
        "percentiles": {f"p{q}": float(np.percentile(part["ms"], q)) for q in (50, 95, 99)},
        "emulator_ms": part["emulator_ms"].median(),
        "possible": 1e3 / part["ms"].mean(),
        "decisions": len(part),
        "scores": [line["score"] for line in _about(rows, "episode", title)],
    }
    return strip(moments(rows, title), facts, f"{title}, {start['model']}, {part['arm'].iloc[0]}", start["remark"])


def weights(rows: pd.DataFrame) -> str:
    """Which weights the rows were taken on."""
    return "; ".join(dict.fromkeys(start["weights"] for start in _about(rows, "start")))


def answer(rows: pd.DataFrame) -> str:
    """The notebook's answer, computed from rows."""
    said = []
    for line in table(rows).to_dict("records"):
        scores = f"{line['episodes']} episode(s), mean score {line['mean score']:.1f}"
        said.append(
            f"{line['game']}: {line['model']} decides in {line['p50']:.1f} ms (p95 {line['p95']:.1f}), "
            f"{line['a second']:.0f} times a second were there nothing else; {line['decisions']} decisions, "
            f"{scores if line['episodes'] else 'no episode to its end'}."
        )
    return " ".join(said + sorted({start["remark"] for start in _about(rows, "start") if start["remark"]}))


def _about(rows: pd.DataFrame, kind: str, title: str | None = None) -> list[dict]:
    lines = [line for line in rows.attrs["about"] if line.get("kind") == kind]
    return [line for line in lines if title is None or line["title"] == title]


# ------------------------------------------------------------------------------------------------ without a notebook


def watch(
    session: Session, decisions: int, say: Callable[[str], None], terminal: bool = False, fps: float | None = None
) -> int:
    """Play `decisions`, saying a line per episode; in a terminal Snake is drawn, `fps` moves a second (None: 12, or as many
    as there can be where it is not drawn). Ctrl-C ends it after the decision. The exit code: 130 after Ctrl-C, 1 where
    the model's answer was none, else 0."""
    from lab.envs.snake_prompts import NoMove
    from lab.errors import NotFinite
    from lab.live_snake import FPS
    from lab.live_snake import watch as watch_snake

    try:
        if is_snake(session.source):
            watch_snake(session, decisions, fps or (FPS if terminal else math.inf), terminal, say)
        else:
            for line in _lines(session, decisions):
                say(line)
    except KeyboardInterrupt:
        say("stopped from the keyboard")
        return 130
    except (NoMove, NotFinite) as error:
        say(f"stopped: {error}")
        return 1
    return 0


def _lines(session: Session, decisions: int) -> Iterator[str]:
    start, said = time.perf_counter(), 0
    for _ in range(decisions):
        session.tick()
        for episode in session.episodes[said:]:
            spent, said = time.perf_counter() - start, said + 1
            yield (
                f"episode {episode.number + 1} (seed {episode.seed}): score {episode.score:g}, {episode.decisions} decisions"
                f"{'' if episode.ended else ', cut by the cap'}; {session.decisions} of {decisions} decisions, {spent:.0f} s"
            )


def summary(session: Session) -> dict:
    """What a session came to, for `lab play`: decisions, episodes, scores, percentiles (ms), rates, seconds to start.

    `decisions_per_second` is what there would be were there nothing else, `played_per_second` what there was at the end.
    """
    left, scores = session.unfinished, [episode.score for episode in session.episodes]
    return clean(
        {
            "game": session.source,
            "model": session.model.name,
            "weights": session.model.weights,
            "step": session.step.name,
            "device": session.model.device.type,
            "dtype": session.model.dtype_name,
            "seed": session.seed,
            "choose": session.choose,
            "frames": session.frames,
            "decisions": session.decisions,
            "episodes": [episode._asdict() for episode in session.episodes],
            "unfinished": left and left._asdict(),
            "mean_score": float(np.mean(scores)) if scores else None,
            "decision_ms": session.decision_ms.percentiles(),
            "decisions_per_second": 1e3 * len(session.decision_ms) / session.decision_ms.total
            if session.decisions
            else 0,
            "played_per_second": session.rate,
            "emulator_ms": session.emulator_ms.percentiles(),
            "start_s": session.start_s,
            "actions": dict(session.taken),
            "remark": session.remark(),
            **{name: count for name, count in session.facts().items() if name == "interventions"},  # of Snake's shield
        }
    )


def summary_text(found: dict) -> str:
    """The same in a few lines."""
    ms, emulator, left = found["decision_ms"], found["emulator_ms"], found["unfinished"]
    if not found["decisions"]:
        return "nothing was played"
    spread = ", ".join(f"{name} {value:.1f}" for name, value in ms.items())
    actions = ", ".join(
        f"{name} {count}" for name, count in sorted(found["actions"].items(), key=lambda pair: -pair[1])
    )
    scores = f"{len(found['episodes'])} episode(s)"
    scores += f", mean score {found['mean_score']:.1f}" if found["episodes"] else ""
    scores += f"; the last one unfinished after {left['decisions']} decisions, score {left['score']:g}" if left else ""
    where = "game" if "interventions" in found else "emulator"  # Snake has none
    start = ", ".join(
        f"{where if part == 'emulator' else part} {seconds:.1f}" for part, seconds in found["start_s"].items()
    )
    played = f", {found['played_per_second']:.1f} played" if found["played_per_second"] else ""
    shield = f"; interventions of the shield: {found['interventions']}" if "interventions" in found else ""
    lines = [
        f"{found['game']}, {found['model']} ({found['weights']}), {found['step']}, {found['device']} {found['dtype']}",
        f"{found['decisions']} decisions, {scores}",
        f"a decision: {spread} ms; {found['decisions_per_second']:.1f} a second were there nothing else{played}",
        f"beside it: {where} {emulator['p50']:.1f} ms (median); before the first: {start} s",
        f"actions: {actions}{shield}",
    ]
    return "\n".join(lines + ([f"note: {found['remark']}"] if found["remark"] else []))
