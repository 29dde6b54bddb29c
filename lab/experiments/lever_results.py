"""What the rows of notebook 08 say of each lever: tables, sentences, `lab bench levers`."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from lab import stats
from lab.experiments.levers import BASE, KEPT, LAYER, PEAKED, run
from lab.published import published
from lab.records import about, clean
from lab.stats import AGAIN

SAME = 1e-4  # logits that lie closer are those of the same arithmetic in another order


def lever_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per comparison and arm: preset, workload, frames, batch, dtype, arm; ms a decision (median) with its
    interval; the paired ratio to the plain decision with its own, and whether it is shown; the largest difference of
    logits from the plain decision's, flips (share of `n` decisions of the model `judge`: `pocket` where that was asked,
    whose answers are peaked) and what the arm cost to start, in seconds. NaN where the answers were not compared."""
    each = rows[rows["preset"].notna() & (rows["stage"] == "total")]  # a lookup alone is no decision
    each = each.assign(ms=each["ms"] / each["describe"].map(lambda said: said.get("batch", 1)))
    costs = {(line["title"], line["arm"]): line["cost"] for line in about(rows, "start_cost")}
    same = {(line["preset"], line["arm"]): line for line in about(rows, "parity")}
    lines = []
    for title, part in each.groupby("title", sort=False):
        tags = part[["preset", "workload"]].iloc[0].to_dict() | {"frames": int(part["frames"].iloc[0])}
        for line in stats.summary(part).to_dict("records"):
            arm = line["arm"]
            own = same.get((tags["preset"], arm), {})
            peaked = same.get((PEAKED, arm), own)
            cost = costs.get((title, arm), {})
            said = part.loc[part["arm"] == arm, "describe"].iloc[0]
            tags |= {"batch": said.get("batch", 1), "dtype": said["dtype"]}
            kept = {key: line[key] for key in ("arm", "low", "high", "ratio", "ratio_low", "ratio_high", "shown")}
            answers = {
                "max_logit": np.fmax(own.get("max_logit", np.nan), peaked.get("max_logit", np.nan)),
                "flips": peaked.get("flips", {}).get("value", np.nan),
                "n": peaked.get("n", 0),
                "judge": peaked.get("preset", ""),
            }
            start = sum(
                value for key, value in cost.items() if key.endswith("_s") and key != "check_s" and key != "choose_s"
            )
            lines.append({**tags, **kept, "ms": line["median"], **answers, "start_s": start})
    return stats.Table(lines)


def floors(rows: pd.DataFrame) -> dict:
    """How near the machine's own ceilings the plain and the tuned decision run: by arm, what `roofline.share_of_floor`
    gives."""
    from lab.roofline import share_of_floor

    line = next(line for line in about(rows, "floor"))
    part = rows[rows["title"] == line["title"]]
    stages = pd.DataFrame(line["stages"])
    return {arm: share_of_floor(stages, part, arm) for arm in (BASE, "tuned") if arm in set(part["arm"])}


def operations(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds by kind of operation, a column per arm, from one profiled decision each."""
    return pd.DataFrame({line["arm"]: line["ms"] for line in about(rows, "operations")})


def bounds(rows: pd.DataFrame) -> pd.DataFrame:
    """What preparing could save at most: rows and masks built once, and the question's embedded tokens kept; ms a decision
    with its interval and the share of the plain decision."""
    from lab.experiments.bidirectional import TITLE, gather_ms

    own = next(title for title in rows["title"] if title != TITLE)
    whole = stats.median_interval(stats.series(rows[rows["title"] == own], BASE))
    found = {
        "inputs built once": stats.median_interval(stats.series(rows[rows["title"] == own], BASE, "build_inputs")),
        "embedded question kept": gather_ms(rows),
    }
    return stats.Table(
        [
            {"what": what, "ms": ms.value, "low": ms.low, "high": ms.high, "share": ms.value / whole.value}
            for what, ms in found.items()
        ]
    )


def sentences(table: pd.DataFrame) -> list[str]:
    """What may be said of each lever in `lever_table`, by the one rule, with what becomes of its answers."""
    said = []
    for line in table[table["ratio"].notna() & ~table["arm"].str.endswith(AGAIN)].to_dict("records"):
        ratio = _ratio(line)
        what = f"{line['preset']}, {line['arm']}"
        what += f" ({line['frames']} frames)" if line["frames"] > 1 else ""
        time = f"took {ratio} times the time" if line["shown"] else f"no difference shown ({ratio})"
        if line["n"]:
            apart = f"at most {line['max_logit']:.1e} apart" if line["max_logit"] else "the same to the last bit"
            time += f"; {line['flips']:.1%} of {line['n']} answers of {line['judge']} change, logits {apart}"
        said.append(f"{what}: {time}.")
    return said


def against_openvino(rows: pd.DataFrame) -> str:
    """The tuned step beside OpenVINO, paired within the comparison at the run's own size; "" where one did not run."""
    title = rows["title"].iloc[0]
    part = rows[rows["title"] == title]
    if not {"tuned", "openvino"} <= set(part["arm"]):
        return ""
    ratio = stats.paired_ratio(part, "tuned", "openvino")
    return stats.sentence(f"{title}: tuned", ratio, stats.paired_ratio(part, BASE + AGAIN, BASE), "openvino")


def answer(table: pd.DataFrame) -> str:
    """The notebook's answer, from `lever_table`: levers that gain with the same answers, those that gain and change them,
    and the rest."""
    own = table[(table["preset"] == table["preset"].iloc[0]) & table["ratio"].notna()]
    own = own[~own["arm"].str.endswith(AGAIN) & ~own["arm"].str.startswith(LAYER)]
    gain, same = own["shown"] & (own["ratio"] < 1), (own["flips"] == 0) & (own["max_logit"] < SAME)
    groups = {
        "Faster, with the same answers": own[gain & same],
        "faster, but the answers change": own[gain & ~same],
        "slower": own[own["shown"] & (own["ratio"] > 1)],
        "no difference shown": own[~own["shown"]],
    }
    said = []
    for words, part in groups.items():
        names = [f"{line['arm']} {_ratio(line)}" for line in part.to_dict("records")]
        said.append(f"{words}: {', '.join(names) or 'none'}")
    layer = [f" {line['arm']} takes {_ratio(line)} times as long as in fp32." for line in table.to_dict("records")
             if line["arm"].startswith(f"{LAYER},")]  # fmt: skip
    whole = f"{own['preset'].iloc[0]}, times the plain decision's time. {'; '.join(said)}."
    return whole + "".join(layer).replace(LAYER, LAYER.capitalize())


def for_page(table: pd.DataFrame) -> pd.DataFrame:
    """`lever_table` in fewer columns, ratios with their intervals in words."""
    lines = table.to_dict("records")
    compared = [
        "" if np.isnan(line["flips"]) else f"{line['flips']:.1%} of {line['n']} ({line['judge']})" for line in lines
    ]
    return stats.Table(
        {
            **{key: table[key] for key in ("preset", "frames", "batch", "dtype", "arm")},
            "ms a decision": table["ms"],
            "times plain": ["" if np.isnan(line["ratio"]) else _ratio(line) for line in lines],
            "shown": table["shown"],
            "answers changed": compared,
            "logits apart": table["max_logit"],
            "start (s)": table["start_s"],
        }
    )


def beside_published(table: pd.DataFrame) -> pd.DataFrame:
    """Of `lever_table` the levers that are published too: times the plain decision's time a decision, here and there, and
    what becomes of the answers: flips here, the score there."""
    batches = published("batching").assign(arm=lambda rows: "batch " + rows["batch"].astype(str))
    alone = batches[batches["batch"] == 1].set_index("dtype")["ms_per_frame"]
    lines = [
        (line.arm, line.ms_per_frame / alone[line.dtype], f"a decision in {line.dtype}, NVIDIA L4")
        for line in batches.itertuples()
    ]
    key = ["image_size", "pixels", "frames", "features_cached"]
    rate = published("play").set_index(key)["decisions_per_second"]
    four, half = "four games at once, NVIDIA L4", rate[512, "device", 1, "no"] / rate[256, "device", 1, "no"]
    lines.append(("half-size pictures", half, four))
    for path in ("device", "processor"):
        lines.append((KEPT, rate[512, path, 2, "no"] / rate[512, path, 2, "yes"], f"{four}, {path} pixels"))
    said = pd.DataFrame(lines, columns=["arm", "published", "published on"])
    score = " to ".join(f"{value:.3f}" for value in published("play_score")["median_normalised_score"])
    said["published score"] = np.where(said["arm"] == "half-size pictures", f"{score}, median of eight games", "")
    return for_page(table)[["preset", "frames", "arm", "times plain", "answers changed"]].merge(said, on="arm")


def kept_frames(rows: pd.DataFrame) -> pd.DataFrame:
    """With two frames a decision: the share of frames whose features were still kept, and how far probabilities then lie
    from encoding anew, here and as published."""
    said, lines = published("feature_cache").set_index("dtype"), []
    apart = {line["preset"]: line["max_probability"] for line in about(rows, "parity") if line["arm"] == KEPT}
    counted = rows[(rows["arm"] == KEPT) & rows["counts"].notna()] if "counts" in rows else rows.iloc[:0]
    for (preset, dtype), part in counted.groupby(["preset", "dtype"], sort=False):
        last = part["counts"].iloc[-1]
        there = said.loc[dtype] if dtype in said.index else {}
        lines.append(
            {"preset": preset, "dtype": dtype, "frames asked for": last["hits"] + last["misses"]}
            | {"kept": last["hits"] / (last["hits"] + last["misses"]), "published kept": there.get("hit_rate")}
            | {"apart": apart[preset], "published apart": there.get("difference")}
        )
    return stats.Table(lines)


def _ratio(line: dict) -> str:
    return stats.spell(line["ratio"], line["ratio_low"], line["ratio_high"])


# ------------------------------------------------------------------------------------------------ lab bench levers


@dataclass(frozen=True)
class Bench:
    """What `lab bench levers` found: the rows and what is read from them."""

    rows: pd.DataFrame

    @cached_property
    def levers(self) -> pd.DataFrame:
        return lever_table(self.rows)

    def table(self) -> str:
        return f"{for_page(self.levers)!r}\n\n{bounds(self.rows)!r}"

    @property
    def verdict(self) -> str:
        return f"{answer(self.levers)} {against_openvino(self.rows)}".strip()

    def to_json(self) -> dict:
        found = {"rows": self.levers, "bounds": bounds(self.rows), "notes": stats.notes(self.rows)}
        return clean({**found, "verdict": self.verdict})


def bench(
    preset: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    weights: str = "default",
) -> Bench:
    """All levers of the profile `full` on CUDA, of `standard` elsewhere, of `smoke` for the preset tiny; see `run`."""
    profile = "smoke" if preset == "tiny" else "standard" if device == "cpu" else "full"
    return Bench(run(profile, out=out, seed=seed, device=device, dtype=dtype or "fp32", preset=preset, weights=weights))
