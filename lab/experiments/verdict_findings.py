"""What the notebooks' results say of each arm, one finding each: what notebook 09 ranks (`lab.experiments.verdict`)."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lab import stats
from lab.experiments.levers import LAYER
from lab.workloads import load_workloads

NOTEBOOKS = {
    "01": "01_token_layout", "02": "02_latency_breakdown", "03": "03_question_first", "04": "04_cuda_graph",
    "05": "05_duplicate_frames", "06": "06_resumed_images", "07": "07_snake_loop", "08": "08_cheaper_levers",
}  # fmt: skip
ONE, MANY = "this machine, batch 1", "large batch"
SAME_LOGITS = 1e-2  # logits that lie closer, with no option flipped, count as the same answer
# By arm: what it is to do, what it costs to build, and a rank of that cost. The first that fits counts; None: no action
# of its own, but a step of a comparison.
ACTIONS = (
    (r"split|simulation|masked|again", None, "", 0),
    (
        r"question first",
        "Put the question first and keep its keys and values",
        "the model must be taught that layout",
        4,
    ),
    (r"reusing frames", "Keep the earlier frame's image rows", "a setting of the step", 1),
    (r"captured", "Capture the whole decision as one CUDA graph", "another step class", 1),
    (r"compile", "Compile the step", "another step class, and the wait at every start", 2),
    (r"tuned", "Take the tuned step", "another step class", 1),
    (r"static", "Fix every shape", "another step class", 1),
    (r"openvino", "Run the step in OpenVINO", "an extra package", 2),
    (r"int8|quanti", "Quantise linear layers to int8", "a setting, and a check of the answers", 2),
    (r"bf16|bfloat16|fp16", "Use a shorter dtype", "a setting, and a check of the answers", 1),
    (r"half-size picture", "Use smaller pictures", "the model must be taught that size", 4),
    (r"batch", "Answer several inputs together", "a loop that steps several games at once", 3),
    (r"feature", "Keep image rows of frames seen before", "a setting of the step", 1),
    (r"prompts? kept", "Keep the tokens of prompts", "a setting of the step", 1),
    (r"padded", "Pad prompts to fixed lengths", "a setting of the step", 1),
)


@dataclass(frozen=True)
class Finding:
    """One arm against its base.

    `ratio` is its time over the base's, with interval; `exact` whether answers stay the same (None: not compared);
    `small`: measured on another model than the run's own, so that it only hints; `aside`: of another kind of loop than the
    run's own (another game, more frames a decision, a conversation, a text loop).
    """

    regime: str
    action: str
    arm: str
    where: str
    ratio: float
    low: float
    high: float
    shown: bool
    parity: str
    exact: bool | None
    effort: str
    rank: int
    notebook: str
    start_s: float = 0.0
    ms: float = math.nan
    ms_high: float = math.nan
    small: bool = False
    aside: bool = False
    workload: str = ""

    @property
    def kind(self) -> str:
        """do, trade (faster, but answers change), hint (another model's), slower, or open (no difference shown)."""
        if not self.shown:
            return "open"
        if self.ratio > 1:
            return "slower"
        return "trade" if self.exact is False else "hint" if self.small else "do"

    @property
    def sentence(self) -> str:
        """The finding in words, without its action."""
        times = f"{stats.spell(self.ratio, self.low, self.high)} times the time"
        said = {
            "do": times,
            "trade": f"{times}, but {self.parity}",
            "hint": f"{times}, measured on another model only",
            "slower": f"it takes longer, {times}",
            "open": f"no difference shown, {times}",
        }[self.kind]
        parts = [said, self.where] + ([self.parity] if self.kind != "trade" else [])
        if self.small and self.kind != "hint":
            parts.insert(1, "on another model")
        if self.kind in ("do", "trade", "hint"):
            parts.append(self.effort)
            parts += [f"{self.start_s:.1f} s at every start"] if self.start_s >= 1 else []
        return "; ".join(part for part in parts if part)


def _action(arm: str) -> tuple[str | None, str, int]:
    for pattern, action, effort, rank in ACTIONS:
        if re.search(pattern, arm, re.IGNORECASE):
            return action, effort, rank
    return f"Use {arm}", "see its notebook", 2


def _finding(arm: str, line: dict, notebook: str, parity: tuple[str, bool | None], **more) -> Finding | None:
    """A finding from a line of results with `ratio` and its interval; None where it holds no comparison."""
    action, effort, rank = _action(arm)
    ratio = number(line.get("ratio"))
    if action is None or ratio is None:
        return None
    bounds = {
        end: next((v for key in (f"ratio_{end}", end) if (v := number(line.get(key))) is not None), math.nan)
        for end in ("low", "high")
    }
    batch = int(line.get("batch") or next(iter(re.findall(r"batch (\d+)", arm)), 1))
    fields = {
        "regime": MANY if batch > 1 else ONE,
        "action": action,
        "where": _where(line, batch),
        "workload": str(line.get("workload") or ""),
        "start_s": number(line.get("start_s")) or 0.0,
        "ms": number(line.get("median"), line.get("ms")),
        "effort": effort,
        "rank": rank,
        **more,
    }
    fields["ms"] = math.nan if fields["ms"] is None else fields["ms"]
    shown = bool(line.get("shown")) and not math.isnan(bounds["low"])
    return Finding(
        arm=arm, ratio=ratio, shown=shown, notebook=notebook, parity=parity[0], exact=parity[1], **bounds, **fields
    )


def number(*values) -> float | None:
    return next((float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)), None)


def _where(line: dict, batch: int) -> str:
    frames = int(line.get("frames") or 1)
    parts = [line.get("workload"), f"{frames} frames" if frames > 1 else None, f"batch {batch}" if batch > 1 else None]
    return ", ".join(str(part) for part in [*parts, line.get("dtype")] if part)


def _parity(line: dict | None) -> tuple[str, bool | None]:
    """In words, whether the answers are the same, from a line with `flips` (a share), `n` and `max_logit`."""
    if not line or (flips := number(line.get("flips"))) is None:
        logit = number(line.get("max_logit")) if line else None
        if logit is None:
            return "answers not compared", None
        return f"logits at most {logit:.0e} apart", logit <= SAME_LOGITS
    n, logit = int(line.get("n") or 0), number(line.get("max_logit")) or 0.0
    apart = f", logits at most {logit:.0e} apart" if logit else ""
    whose = f" of {line['judge']}" if line.get("judge") else ""
    if flips:
        share = f"{flips:.1%}" if flips <= 1 else f"{flips:.0f}"
        return f"{share} of{f' {n}' if n else ''} answers{whose} change{apart}", False
    return f"no answer{whose} changed{f' of {n}' if n else ''}{apart}", logit <= SAME_LOGITS or None


def _graphs(results: dict) -> Iterator[Finding | None]:
    found, name = results.get(NOTEBOOKS["04"], {}), NOTEBOOKS["04"]
    keys = ("preset", "workload", "frames", "batch", "dtype", "arm")
    parity = {tuple(line.get(key) for key in keys): line for line in found.get("parity", [])}
    own = next(iter(found.get("speed", [])), {})
    for line in found.get("speed", []):
        if line.get("graph") == "not used":
            continue
        same = parity.get(tuple(line.get(key) for key in keys))
        yield _finding(str(line.get("arm")), line, name, _parity(same), **_beside(own, line), **_high(line))


def _beside(own: dict, line: dict) -> dict:
    """Whether a line is of another model than the run's own, and whether its decisions see more frames."""
    more = int(line.get("frames") or 1) > int(own.get("frames") or 1)
    return {"small": line.get("preset") != own.get("preset"), "aside": more}


def _question_first(results: dict) -> Iterator[Finding | None]:
    found, name = results.get(NOTEBOOKS["03"], {}), NOTEBOOKS["03"]
    parity = {(line.get("title"), line.get("arm")): line for line in found.get("parity", [])}
    for line in found.get("savings", []):
        title = f"{line.get('workload')}, batch {line.get('batch')}, {line.get('dtype')}"
        if str(line.get("arm")).startswith("question first"):
            yield _finding(str(line["arm"]), line, name, _parity(parity.get((title, line["arm"]))), **_high(line))


def _high(line: dict) -> dict:
    """The upper bound of the time itself, where a line has one beside the ratio's."""
    high = number(line.get("high"))
    return {"ms_high": math.nan if high is None else high}


def _levers(results: dict) -> Iterator[Finding | None]:
    found = results.get(NOTEBOOKS["08"], {}).get("levers", [])
    own = next(iter(found), {})
    for line in found:
        arm, more = str(line.get("arm")), _high(line)
        if arm.startswith(LAYER):  # its time is no decision's
            more = {"ms": math.nan, "where": LAYER}
        yield _finding(arm, line, NOTEBOOKS["08"], _parity(line), **_beside(own, line), **more)


def _repeats(results: dict) -> Iterator[Finding | None]:
    """Answering a repeated frame from the last answer: exact; and reusing the features of nearly equal ones: not."""
    found, name = results.get(NOTEBOOKS["05"], {}), NOTEBOOKS["05"]
    action, same = (
        "Answer a repeated frame from the last answer",
        ("the same answer, since the frame is the same", True),
    )
    more = {"effort": "a few lines around the step", "rank": 1}
    saved = [line for line in found.get("saved", []) if line.get("policy") == "one_hot"]
    saved.sort(key=lambda line: line["saves"])
    own = _own_source(results)
    chosen = {"the run's own game": next((line for line in saved if line["source"] == own), None)}
    if len(saved) > 1:
        chosen |= {f"the most of {len(saved)} games": saved[-1]}
    if len(saved) > 2:
        chosen |= {f"the middle of {len(saved)} games": saved[len(saved) // 2]}
    for said, line in chosen.items():
        if line is not None:
            ratio = {"ratio": 1 - line["saves"], "low": _less(line["saves_high"]), "high": _less(line["saves_low"])}
            ratio["shown"] = ratio["high"] is not None and ratio["high"] < 1
            elsewhere = line["source"] != own
            what = f"In {line['source']}: {lower(action)}" if elsewhere else action
            where = f"{line['source']}, {said}"
            yield _finding("last answer", ratio, name, same, where=where, action=what, aside=elsewhere, **more)
    yield _nearly(found, name)
    for line in results.get(NOTEBOOKS["01"], {}).get("repeats") or []:
        ratio = {"ratio": 1 - line["identical"], "low": _less(line["high"]), "high": _less(line["low"])}
        ratio["shown"] = line["identical"] > 0 and ratio["high"] < 1
        where = f"{line['workload']}, {line['pairs']} pairs of frames, what looking costs left out"
        yield _finding("last answer", ratio, NOTEBOOKS["01"], same, where=where, action=action, **more)


def _own_source(results: dict) -> str | None:
    """The frame source of the run's first workload, where that is a shipped one."""
    first = next(iter(results.get(NOTEBOOKS["02"], {}).get("stages") or {}), None)
    return next((w.source for name, w in load_workloads().items() if name == first), None)


def _nearly(found: dict, notebook: str) -> Finding | None:
    """Reuse of image rows where at most a thousandth of the pixels changed, over all sources that were asked."""
    lines = {line["source"]: line for line in found.get("flips", []) if 0 < line["threshold"] <= 0.001}.values()
    count = sum(line["decisions"] for line in lines)
    if not count:
        return None
    reused, flipped = (sum(line[key] * line["decisions"] for line in lines) / count for key in ("reused", "flipped"))
    ratio = {"ratio": 1 - reused, "low": 1 - reused, "high": 1 - reused, "shown": reused > 0}
    where = f"{len(lines)} game{'s' * (len(lines) > 1)}, if a reused decision cost nothing"
    action = "Reuse image rows where fewer than 0.1 % of the pixels changed"
    more = {"effort": "a few lines around the step", "rank": 1, "where": where, "action": action}
    return _finding("nearly equal frames", ratio, notebook, _parity({"flips": flipped, "n": count}), **more)


def _less(share: float | None) -> float | None:
    return None if share is None else 1 - share


def _resume(results: dict) -> Iterator[Finding | None]:
    """The first turn of a conversation that has something to skip."""
    turns = results.get(NOTEBOOKS["06"], {}).get("turns", [])
    for line in [line for line in turns if line.get("encoded") != line.get("encoded_without")][:1]:
        where = f"{line.get('case')} of a conversation, {line['encoded']} of {line['images']} images encoded"
        same = ("every reply the same", True) if line.get("tokens_equal") else ("some replies differ", False)
        action = "Where prompts resume: encode only images that the kept state does not hold"
        effort = {"effort": "a plan of what to encode (lab.resume)", "rank": 2, "aside": True}
        yield _finding("skip", line, NOTEBOOKS["06"], same, where=where, action=action, **effort)


def _text(results: dict) -> Iterator[Finding | None]:
    """The fastest candidate of each model: the others stand in its notebook."""
    found, name = results.get(NOTEBOOKS["07"], {}), NOTEBOOKS["07"]
    ablation = found.get("ablation") or {}
    asked = {"judge": next(iter(ablation), "")}  # the model whose actions were compared
    same = {line.get("candidate"): line | asked for line in found.get("actions", [])}
    for model, lines in ablation.items():
        others = [line for line in lines if line.get("candidate") != "eager" and number(line.get("ratio")) is not None]
        for line in sorted(others, key=lambda line: line["ratio"])[:1]:
            arm = str(line.get("candidate"))
            moved = same.get(arm)
            parity = _parity(moved and {"flips": 1 - moved["executed"] / moved["moves"], "n": moved["moves"], **moved})
            _, effort, rank = _action(arm)
            more = {"action": f"In a text loop: {arm}", "effort": effort, "rank": rank, "aside": True}
            yield _finding(
                arm, line, name, parity, where=f"model {model}", start_s=line.get("compile_s") or 0.0, **more
            )


def lower(text: str) -> str:
    """A text that goes on in a sentence."""
    return text[:1].lower() + text[1:]


SOURCES: tuple[Callable[[dict], Iterator[Finding | None]], ...] = (
    _graphs, _question_first, _levers, _repeats, _resume, _text,
)  # fmt: skip


def merge(found: Iterator[Finding | None]) -> list[Finding]:
    """One finding per regime, action, arm and dtype: the first, which is the run's first workload, unless a later one is
    of another kind, in which case both stand."""
    kept: dict[tuple, Finding] = {}
    for one in found:
        if one is not None:
            dtype = one.where.rpartition(", ")[2]
            kept.setdefault((one.regime, one.action, one.arm, dtype, one.kind), one)
    return list(kept.values())
