"""Matplotlib figures, readable on a light and on a dark page; `lab.views` has what is shown as HTML.

A figure function takes rows or results and returns a Figure; it draws on a transparent ground in mid-grey, with
colour-blind-safe colours. One file per topic; all of them are reached from here.
"""

from lab.figures.base import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    VERMILION,
    label_points,
    new_figure,
    style,
)  # fmt: skip
from lab.figures.duplicates import change_curves, flip_lines, frame_pairs, recurrence_lines, repeat_dots
from lab.figures.imitation import agreement_dots, score_dots
from lab.figures.latency import arm_bars, floor_bars, stage_bars, timeline
from lab.figures.levers import lever_dots, operation_bars
from lab.figures.live import live_strip
from lab.figures.question_first import movement_lines, saving_bars
from lab.figures.resume import first_token_bars, prompt_strips, saving_growth
from lab.figures.snake import candidate_dots, loop_stages, memory_lines, policy_dots
from lab.figures.token_layout import SEGMENT_COLOURS, token_bars
from lab.figures.verdict import gain_dots

__all__ = [
    "BLUE", "FAINT", "GREEN", "GREY", "ORANGE", "PALETTE", "PURPLE", "SEGMENT_COLOURS", "SKY", "VERMILION",
    "agreement_dots", "arm_bars", "candidate_dots", "change_curves", "first_token_bars", "flip_lines",
    "floor_bars", "frame_pairs", "gain_dots", "label_points", "lever_dots", "live_strip", "loop_stages",
    "memory_lines", "movement_lines", "new_figure", "operation_bars", "policy_dots", "prompt_strips",
    "recurrence_lines", "repeat_dots", "saving_bars", "saving_growth", "score_dots", "stage_bars", "style", "timeline",
    "token_bars",
]  # fmt: skip
