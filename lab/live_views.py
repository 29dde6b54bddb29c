"""How a moment of play is written on a page: bars, numbers, and a strip of moments that needs no live panel.

Everything is inline, in colours that a light and a dark page can carry; the panel and the report show the same.
"""

from collections.abc import Sequence
from html import escape

import numpy as np

from lab.figures import BLUE, GREY, ORANGE, VERMILION
from lab.moments import Moment, data_address
from lab.views import View

DIM = f"color:var(--jp-ui-font-color2,{GREY})"
FACE = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,inherit)"
NUMBERS = "font-variant-numeric:tabular-nums;white-space:nowrap"


def bars(
    moment: Moment, before: Moment | None = None, taken: dict[str, int] | None = None, compact: bool = False
) -> str:
    """The options as bars, the most probable first, the action taken in orange with a mark; in an answer without an
    action the most probable one. `before` is an answer to compare with: its share is a red line, the change in points
    beside it. `taken` counts actions so far. Of Snake also what each option said, and the other two questions."""
    earlier = {} if before is None else dict(zip(before.names, before.probabilities, strict=True))
    marked = moment.action or moment.ranked[0][0]
    widths = "minmax(64px,auto) 1fr 42px" if compact else "14px minmax(90px,auto) minmax(80px,1fr) 48px 56px"
    told = {} if compact else dict(zip(moment.names, getattr(moment, "told", ()), strict=False))
    if told:  # as wide whatever is told, so that the bars stay where they are
        widths = "14px minmax(90px,1.3fr) minmax(80px,1fr) 48px 40px"
    cells = []
    for name, share in moment.ranked:
        chosen = name == marked
        colour = ORANGE if chosen else BLUE
        line = f'<i style="{_at(earlier[name])};width:2px;background:{VERMILION}"></i>' if name in earlier else ""
        change = f"{round(100 * (share - earlier[name]), 1) + 0.0:+.1f}" if name in earlier else ""
        count = change or (f"×{taken[name]}" if taken and taken.get(name) else "")
        weight = "font-weight:600;" if chosen else ""
        about = f' <span style="font-weight:400;{DIM}">{escape(told[name])}</span>' if name in told else ""
        cells += [] if compact else [f'<span style="color:{ORANGE}">{"▶" if chosen else ""}</span>']
        cells += [
            f'<span style="{weight}overflow:hidden;text-overflow:ellipsis;white-space:nowrap">{escape(name)}{about}</span>',
            _bar(share, colour, line),
            f'<span style="{weight}text-align:right;{NUMBERS}">{share:.0%}</span>',
        ]
        cells += [] if compact else [f'<span style="text-align:right;{DIM};{NUMBERS}">{count}</span>']
    for asked, share in () if compact else getattr(moment, "others", ()):
        cells += [
            f'<span style="grid-column:1/-1;margin-top:5px;{DIM}">{escape(asked)}</span><span></span><span>yes</span>',
            f'{_bar(share, BLUE)}<span style="text-align:right;{NUMBERS}">{share:.0%}</span><span></span>',
        ]
    size = "11px/15px" if compact else "12px/17px"
    return (
        f'<div style="display:grid;grid-template-columns:{widths};gap:1px 8px;align-items:center;font-size:{size[:4]};'
        f'line-height:{size[5:]}">{"".join(cells)}</div>'
    )


def _bar(share: float, colour: str, line: str = "") -> str:
    return (
        f'<span style="position:relative;height:11px;background:{GREY}2e;border-radius:2px"><i style="position:absolute;'
        f'left:0;top:0;bottom:0;width:{100 * share:.1f}%;background:{colour};border-radius:2px"></i>{line}</span>'
    )


def _at(share: float) -> str:
    return f"position:absolute;top:-2px;bottom:-2px;left:calc({100 * share:.1f}% - 1px)"


def numbers(moment: Moment, facts: dict, draw_ms: float | None = None) -> str:
    """What stands beside the bars: confidence and P(act), times with their spark line, the rate, the episode."""
    p = facts["percentiles"]
    spread = " · ".join(f"{name} {value:.1f}" for name, value in p.items()) + (" ms" if p else "")
    possible = f' <span style="{DIM}">of {facts["possible"]:.0f} possible</span>' if facts["possible"] else ""
    game = "game" if "interventions" in facts else "emulator"  # Snake has none
    drawing = "" if draw_ms is None else f" · drawing {draw_ms:.1f} ms"
    rate = f"{facts['rate']:.1f}" if facts["rate"] else "–"
    scores = facts["scores"]
    mean = f" · mean of {len(scores)} {np.mean(scores):.1f}" if scores else ""
    lines = [
        ("answer", f"confidence <b>{moment.confidence:.2f}</b> · P(act) <b>{moment.p_act:.2f}</b>"),
        ("decision", f"<b>{moment.decision_ms:.1f} ms</b> {spark(facts['times'])}<br>{spread}"),
        (
            "pace",
            f'<b class="refrain-rate">{rate}</b> decisions/s{possible}',
        ),
        ("not in it", f'<span style="{DIM}">{game} {facts["emulator_ms"]:.1f} ms{drawing}</span>'),
        (
            "episode",
            f"<b>{moment.episode + 1}</b> · score <b>{moment.score:g}</b>{mean} · {facts['decisions']} actions",
        ),
    ]
    if "interventions" in facts:
        refused = getattr(moment, "refused", "")
        now = f"<b>{refused}</b> was proposed, which is not safe · " if refused else ""
        lines.append(("shield", f"{now}interventions <b>{facts['interventions']}</b>"))
    cells = "".join(f'<span style="{DIM}">{name}</span><span>{text}</span>' for name, text in lines)
    return (
        f'<div style="display:grid;grid-template-columns:auto 1fr;gap:3px 12px;font-size:12px;line-height:17px;'
        f'align-items:baseline;{NUMBERS}">{cells}</div>'
    )


def spark(times: Sequence[float], width: int = 150, height: int = 18) -> str:
    """The last times as a line, oldest left; the dotted line is their median. Empty for fewer than two."""
    values = np.asarray(times, float)
    if len(values) < 2:
        return ""
    top = max(np.percentile(values, 98), 1e-9) * 1.15
    xs = np.linspace(width - width * (len(values) - 1) / 119, width, len(values)) if len(values) < 120 else None
    xs = np.linspace(0, width, len(values)) if xs is None else xs
    ys = height - 1 - (height - 3) * np.minimum(values / top, 1)
    middle = height - 1 - (height - 3) * min(float(np.median(values)) / top, 1)
    points = " ".join(f"{x:.0f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return (
        f'<svg width="{width}" height="{height}" style="vertical-align:-4px" role="img" aria-label="the last '
        f'{len(values)} decision times"><line x1="0" x2="{width}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="{GREY}" '
        f'stroke-dasharray="1 3"/><polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="1.2"/></svg>'
    )


def strip(moments: Sequence[Moment], facts: dict, title: str, remark: str = "") -> View:
    """Moments side by side, each a picture with its bars and numbers, below a line of totals; says the same as text."""
    p = facts["percentiles"]
    spread = ", ".join(f"{name} {value:.1f}" for name, value in p.items())
    scores = facts["scores"]
    played = f"{len(scores)} episode(s), mean score {np.mean(scores):.1f}" if scores else "no episode played to its end"
    game, shield = "emulator", ""
    if "interventions" in facts:  # Snake has no emulator, but a shield
        game, shield = "game", f"; interventions of the shield: {facts['interventions']}"
    totals = (
        f"{facts['decisions']} decisions, {facts['possible']:.0f} a second possible ({spread} ms); {game} "
        f"{facts['emulator_ms']:.1f} ms beside it; {played}{shield}"
    )
    cards, lines = [], []
    for moment in moments:
        best, share = moment.ranked[0]
        done = moment.action or best
        under = f"{moment.decision_ms:.1f} ms · score {moment.score:g}<br>"
        under += f"confidence {moment.confidence:.2f} · P(act) {moment.p_act:.2f}"
        cards.append(
            f'<div style="width:184px"><div style="{DIM};font-size:11px">episode {moment.episode + 1}, decision '
            f'{moment.number}</div><div style="height:150px;margin:2px 0 5px"><img alt="frame of decision {moment.number}" '
            f'src="{data_address(moment.frame)}" style="height:150px;max-width:184px;object-fit:contain;'
            f'image-rendering:pixelated;border-radius:3px"></div>{bars(moment, compact=True)}'
            f'<div style="{DIM};font-size:11px;margin-top:4px">{under}</div></div>'
        )
        lines.append(
            f"episode {moment.episode + 1}, decision {moment.number}: {done} (most probable {best} {share:.0%}), "
            f"{moment.decision_ms:.1f} ms, score {moment.score:g}"
        )
    note = f'<div style="color:{ORANGE};font-size:12px">{escape(remark)}</div>' if remark else ""
    html = (
        f'<div class="refrain-strip" style="{FACE};font-size:13px"><div><b>{escape(title)}</b></div>'
        f'<div style="font-size:12px;{DIM}">{escape(totals)}</div>{note}'
        f'<div style="display:flex;flex-wrap:wrap;gap:14px 18px;margin-top:8px">{"".join(cards)}</div></div>'
    )
    return View(html, "\n".join([f"{title}: {totals}", *([remark] if remark else []), *lines]))
