"""Notebook 09: what to do on this machine, computed from the results that the other notebooks left in a run's folder.

Every arm that was compared becomes a finding: what it is to do, how many times the time it takes, whether that is shown by
the one rule, whether the answers stay the same, and what it costs to build. Findings are ranked per regime; what gains
nothing, or changes answers, is listed as not to be built, with the reason. Nothing here is written beforehand: other
results give other sentences.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from lab import stats
from lab.errors import InputError
from lab.experiments.verdict_findings import MANY, NOTEBOOKS, ONE, SOURCES, Finding, lower, merge, number
from lab.records import read_rows
from lab.views import View


@dataclass(frozen=True)
class Regime:
    """What was found for one way of running: what to do, best first; what not to build; and what limits it."""

    name: str
    headline: str
    do: list[Finding] = field(default_factory=list)
    dont: list[Finding] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)  # a sentence and its notebook


@dataclass(frozen=True)
class Verdict:
    regimes: list[Regime]
    missing: list[str]
    measured: list[str]

    @property
    def answer(self) -> str:
        """One sentence a regime, and what was not measured."""
        said = [regime.headline for regime in self.regimes]
        if self.missing:
            names = ", ".join(name.split("_")[0] for name in self.missing)
            said.append(
                f"{len(self.measured)} of {len(NOTEBOOKS)} notebooks left results; not measured in this run: {names}."
            )
        return " ".join(said)

    def to_json(self) -> dict:
        def told(one: Finding) -> dict:
            return {**asdict(one), "kind": one.kind, "sentence": one.sentence}

        return {
            "regimes": [
                {**asdict(regime), "do": [told(one) for one in regime.do], "dont": [told(one) for one in regime.dont]}
                for regime in self.regimes
            ],
            "missing": self.missing,
            "measured": self.measured,
        }


def judge(folder: Path | str, hz: float = 10.0) -> Verdict:
    """The verdict of a run's folder; `hz` is the decision rate, per second, of the last regime.

    Notebooks that left no results are named as missing. Raises InputError for a folder that is not there or an `hz` that
    is no number above 0.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"There is no run's folder {folder}; give one that `lab run` wrote.")
    if isinstance(hz, bool) or not isinstance(hz, int | float) or not 0 < hz < math.inf:
        raise InputError(f"hz is {hz!r}; give the number of decisions a second, above 0.")
    results = {name: found for name in NOTEBOOKS.values() if (found := _results(folder / f"{name}.json"))}
    findings = merge(one for source in SOURCES for one in source(results))
    regimes = [
        _regime(ONE, [one for one in findings if one.regime == ONE], _facts(results)),
        _regime(MANY, [one for one in findings if one.regime == MANY], []),
        _rate(folder, results, findings, hz),
    ]
    missing = [name for name in NOTEBOOKS.values() if name not in results]
    return Verdict(regimes, missing, list(results))


def _results(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["results"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------------------ findings -> verdict


def _regime(name: str, findings: list[Finding], facts: list[tuple[str, str]]) -> Regime:
    do = [one for one in findings if one.kind == "do"]
    do.sort(key=lambda one: (one.aside, round(one.ratio, 2), one.rank))
    rest = [one for one in findings if one.kind != "do"]
    rest.sort(key=lambda one: (one.aside, _ORDER[one.kind], one.ratio))
    title, own = f"{name[0].upper()}{name[1:]}", [one for one in findings if not one.aside]
    best = [one for one in do if not one.aside]
    if best:
        first = best[0]
        times = stats.spell(first.ratio, first.low, first.high)
        where = f", {first.where}" if first.where else ""
        then = f", then {lower(best[1].action)}" if len(best) > 1 else ""
        headline = f"{title}: {lower(first.action)} ({times} times the time{where}){then}."
    elif own:
        arms = f"of {len(own)} arms measured none is" if len(own) > 1 else "the one arm measured is not"
        headline = f"{title}: {arms} shown to gain with the same answers; leave it as it is."
    else:
        headline = f"{title}: {'not measured in this run' if not findings else 'no arm of the own loop was measured'}."
    lost = list(dict.fromkeys(one.action for one in rest if not one.aside and one.kind != "hint"))
    lost = [action for action in lost if action not in {one.action for one in do}]
    if lost:
        headline += f" Do not build: {'; '.join(map(lower, lost[:4]))}."
    return Regime(name, headline, do, rest, facts)


_ORDER = {"trade": 0, "hint": 1, "slower": 2, "open": 3}


def _facts(results: dict) -> list[tuple[str, str]]:
    """What limits a decision, whatever is built: the largest stage, its share of the floor, the bound of a free question."""
    said = []
    stages = results.get(NOTEBOOKS["02"], {}).get("stages") or {}
    for title, lines in list(stages.items())[:1]:
        table = {line["stage"]: line for line in lines if line["arm"] == "causal"}
        if "total" in table and len(table) > 1:
            largest = max((line for stage, line in table.items() if stage != "total"), key=lambda line: line["share"])
            took = f"{table['total']['median']:.4g} ms, {largest['share']:.0%} of it in {largest['stage']}"
            text = f"{title}: a decision takes {took}"
            floor = {line["stage"]: line for line in results[NOTEBOOKS["02"]].get("floor", {}).get("stages", [])}
            share = number(floor.get(largest["stage"], {}).get("share"))
            text += f", which runs at {share:.0%} of what this machine allows" if share else ""
            said.append((f"{text}.", NOTEBOOKS["02"]))
    for line in (results.get(NOTEBOOKS["03"], {}).get("bounds") or [])[:1]:
        bound = stats.spell(
            line["bound (%)"], *(math.nan if line[k] is None else line[k] for k in ("low", "high")), ".1f"
        )
        said.append(
            (f"{line['workload']}: a question that cost nothing would save {bound} % at most.", NOTEBOOKS["03"])
        )
    return said


def _rate(folder: Path, results: dict, findings: list[Finding], hz: float) -> Regime:
    """Which arms keep up with `hz` decisions a second: the plain one, else those that cost least to build."""
    name, period = f"{hz:g} decisions a second", 1000 / hz
    plain = _plain(results)
    if plain is None:
        return Regime(name, f"{name}: not measured in this run.")
    title, line, notebook = plain
    facts = [(text, notebook) for text in _missed(folder, title, hz)]
    high = number(line.get("high"), line["median"])
    says = f"{name}, {period:.4g} ms each"
    if high <= period:
        return Regime(
            name,
            f"{says}: nothing need be done; the plain decision takes {line['median']:.4g} ms ({title}).",
            facts=facts,
        )
    timed = [
        one for one in findings if one.regime == ONE and one.ms == one.ms and one.exact is not False and not one.small
    ]
    timed = [one for one in timed if one.workload in ("", title) and not one.aside]
    able = [one for one in timed if (one.ms if math.isnan(one.ms_high) else one.ms_high) <= period]
    if able:
        able.sort(key=lambda one: (one.rank, one.ms))
        first = able[0]
        action = f"{lower(first.action)}"
        headline = (
            f"{says}: the plain decision takes {line['median']:.4g} ms and is too slow ({title}); {action} takes "
            f"{first.ms:.4g} ms and keeps up."
        )
        return Regime(name, headline, able, [], facts)
    fastest = min([(one.ms, one.action) for one in timed] + [(line["median"], "the plain decision")])
    headline = (
        f"{says}: nothing measured keeps up ({title}); the fastest, {lower(fastest[1])}, takes "
        f"{fastest[0]:.4g} ms, {fastest[0] / period:.2g} times too long. Take a smaller model or picture, or another "
        "machine, or decide less often."
    )
    return Regime(name, headline, facts=facts)


def _plain(results: dict) -> tuple[str, dict, str] | None:
    """The plain decision of the run's first workload: its name, median and bound, and the notebook."""
    for title, lines in (results.get(NOTEBOOKS["02"], {}).get("stages") or {}).items():
        for line in lines:
            if line["arm"] == "causal" and line["stage"] == "total":
                return title, line, NOTEBOOKS["02"]
    for line in results.get(NOTEBOOKS["04"], {}).get("speed", []):
        if line.get("arm") == "eager" and line.get("batch") == 1:
            return str(line["workload"]), line, NOTEBOOKS["04"]
    return None


def _missed(folder: Path, title: str, hz: float) -> list[str]:
    """How many decisions of the raw rows, where they lie there, missed their deadline."""
    path = folder / f"{NOTEBOOKS['02']}.rows.jsonl"
    if not path.is_file():
        return []
    rows = read_rows(path)
    part = rows[rows["title"] == title] if "title" in rows else rows
    try:
        missed = stats.missed_deadlines(part, "causal", hz)
    except InputError:
        return []
    share = missed["share"]
    return [
        f"{missed['missed']} of {missed['of']} plain decisions missed a deadline of {missed['period_ms']:.4g} ms "
        f"({stats.spell(100 * share.value, 100 * share.low, 100 * share.high, '.0f')} %)."
    ]


# ------------------------------------------------------------------------------------------------ verdict -> a page


def html(verdict: Verdict, pages: set[str], ending: str = "html") -> str:
    """The verdict as HTML that stands alone. `pages`: the notebooks whose page can be led to, as NAME.`ending`."""
    return "".join(_section(regime, pages, ending) for regime in verdict.regimes)


def _section(regime: Regime, pages: set[str], ending: str) -> str:
    def link(notebook: str) -> str:
        name = escape(notebook)
        return f'<a href="{name}.{ending}">{name}</a>' if notebook in pages else name

    title, _, rest = regime.headline.partition(": ")  # the title is the regime's name, and may say its period
    said = [f"<h3>{escape(title)}</h3><p><b>{escape(rest[:1].upper() + rest[1:])}</b></p>"]
    if regime.do:
        lines = (
            f"<li><b>{escape(one.action)}</b>: {escape(one.sentence)} ({link(one.notebook)})</li>" for one in regime.do
        )
        said.append(f"<p>What to do, the largest gain first:</p><ol>{''.join(lines)}</ol>")
    if regime.dont:
        lines = (f"<li>{escape(one.action)}: {escape(one.sentence)} ({link(one.notebook)})</li>" for one in regime.dont)
        said.append(f"<p>What not to build here, and why:</p><ul>{''.join(lines)}</ul>")
    if regime.facts:
        lines = (f"<li>{escape(text)} ({link(notebook)})</li>" for text, notebook in regime.facts)
        said.append(f"<p>What limits it:</p><ul>{''.join(lines)}</ul>")
    return "".join(said)


def view(verdict: Verdict, folder: Path | str, headless: bool = False) -> View:
    """The verdict for a notebook's page: links lead to the report's pages (`headless`), else to the notebooks."""
    pages = {name for name in NOTEBOOKS.values() if not headless or (Path(folder) / f"{name}.ipynb").is_file()}
    return View(html(verdict, pages, "html" if headless else "ipynb"), verdict.answer)
