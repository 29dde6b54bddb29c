"""The command `lab`. Each command imports what it needs when it runs, so that help comes at once and `lab bench` works
on a machine that has no Jupyter, emulators, gymnasium, ipywidgets or papermill."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.errors import InputError

app = typer.Typer(
    help="Measure what a vision-language model's decisions cost when the question stays and only the frame changes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure from the command line, no Jupyter needed.", no_args_is_help=True)
app.add_typer(bench, name="bench")
train = typer.Typer(help="Train the small models that come with the package anew.", no_args_is_help=True)
app.add_typer(train, name="train")

Preset = Annotated[str | None, typer.Option(help="smolvlm-256m (the default) or tiny.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="Only this dtype: fp32 or bf16.")]
Out = Annotated[Path | None, typer.Option(help="Keep the raw rows in this JSON-lines file.")]
Weights = Annotated[str, typer.Option(help="default, or random where the offline weights are not installed.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; its document is the last line.")]


@app.command()
def run(
    profile: Annotated[str, typer.Option(help="smoke (seconds), standard (minutes), full (for a GPU).")] = "standard",
    out: Annotated[Path | None, typer.Option(help="Folder to write into [default: reports/<date-time>].")] = None,
    only: Annotated[str | None, typer.Option(help="Which notebooks: 01,05 or their names.")] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME VALUE", help="Set a notebook parameter; may be repeated."),
    ] = None,
    notebooks: Annotated[Path | None, typer.Option(help="Folder of the notebooks [default: the checkout's].")] = None,
    rows: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Show the rows measured elsewhere that FOLDER holds.")
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure your own question and frames: a workload file.")
    ] = None,
) -> None:
    """Run the notebooks and write a report that opens anywhere: FOLDER/index.html."""
    from lab import runner

    pairs = [text.partition("=") for text in parameter or []]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise InputError(f"-p takes a name and a value, not {name!r} alone")
    parameters = {name: value for name, _, value in pairs}
    raise typer.Exit(runner.run(profile, out, only, parameters, notebooks, rows=rows, workload=workload))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="What `lab run` wrote.")]) -> None:
    """Make the pages and index.html anew from a folder's executed notebooks."""
    from lab.report import build

    print(f"report: {build(folder)}")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, several runs' folder, or a rows file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one; ratios are B's time over A's.")],
    as_json: Json = False,
) -> None:
    """Compare two runs arm by arm: another machine, dtype, commit or library version. Another workload is refused."""
    from lab.two_runs import compare_runs

    found = compare_runs(a, b)
    print(json.dumps(found.to_json()) if as_json else found.text())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which tokenizer and weights are used, and what to do about what is missing."""
    from lab.doctor import examine, show

    findings = examine()
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        show(findings)
    raise typer.Exit(1 if any(finding.state == "missing" for finding in findings) else 0)


@app.command()
def check(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint folder, a hub name, or a model of ours such as pocket.")
    ],
    as_json: Json = False,
) -> None:
    """Say what a checkpoint is, how it will be asked, and whether its answers hold together; exit code 1 where not."""
    from lab.check import Check
    from lab.doctor import show

    with _quiet(as_json):
        found = Check(checkpoint)
    if as_json:
        print(json.dumps(found.document()))
    else:
        show(found.findings, "nothing is wrong with it")
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def tokens(as_json: Json = False) -> None:
    """Count the tokens of each workload's prompt by segment, and the share that never changes."""
    with _quiet(as_json):
        from lab.experiments.token_layout import table

        found = table()
    if as_json:
        print(json.dumps(found))
    else:
        _print_table(found)


@app.command()
def duplicates(
    game: Annotated[str | None, typer.Option(help="An Atari game: Breakout, Pong, ...")] = None,
    scenario: Annotated[str | None, typer.Option(help="A Doom scenario: basic, deadly_corridor, ...")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every game and scenario there is.")] = False,
    steps: Annotated[int, typer.Option(help="Decisions to play.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of environment and policy.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds, from --seed on.")] = 1,
    policy: Annotated[
        str, typer.Option(help="Who plays: one_hot, per_button (Doom), no_op, repeat, pocket; several with commas.")
    ] = "one_hot",
    workers: Annotated[int | None, typer.Option(help="Processes here [default: one per processor].")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="A Dask scheduler's address, tcp://host:8786: work on its workers instead.")
    ] = None,
    published_resets: Annotated[
        bool, typer.Option("--published-resets", help="Count frames after a reset as the published figures do.")
    ] = False,
    as_json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Keep the rows here [default with --all: reports/duplicates.rows.jsonl].")
    ] = None,
) -> None:
    """Say how often a frame repeats an earlier one, and how many pixels change otherwise: of one game, or of all."""
    if [game is not None, scenario is not None, every].count(True) != 1:
        raise InputError("Give either --game (Atari) or --scenario (Doom), or --all for every one of them.")
    if steps < 2:
        raise InputError(f"--steps is {steps}; it takes at least 2 to compare a frame with the one before it.")
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; give a whole number of 1 or more.")
    source = None if every else f"doom:{scenario}" if game is None else f"atari:{game}"
    with _quiet(as_json):
        from lab.experiments import duplicates as experiment
        from lab.workloads import listed

        try:
            names = listed(policy) or [policy]
            found = experiment.survey(
                source, steps, range(seed, seed + seeds), names, out, workers, scheduler, published_resets
            )
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(found.document))
    else:
        _print_table(found.table)


@app.command()
def play(
    game: Annotated[
        str | None, typer.Option(help="snake, which is drawn in the terminal, or an Atari game: Pong, Breakout, ...")
    ] = None,
    scenario: Annotated[str | None, typer.Option(help="A Doom scenario.", show_default="basic")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A preset, a checkpoint folder or a hub name.", show_default="pocket; for Snake snake"),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="static, eager, split, question_first, compiled, ...; for Snake eager or compiled.",
            show_default="static; for Snake eager",
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="The backbone's: fp32 or bf16.")] = "fp32",
    frames: Annotated[int, typer.Option(help="Frames per decision, 1 to 8; Snake's model reads none.")] = 1,
    choose: Annotated[str, typer.Option(help="greedy, or sampled from the probabilities.")] = "greedy",
    steps: Annotated[int, typer.Option(help="Decisions to play.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the episodes.")] = 0,
    record: Annotated[
        Path | None, typer.Option(help="Keep what was played as a moving picture, out.gif: 400 decisions at most.")
    ] = None,
    optimize: Annotated[
        bool, typer.Option("--optimize", help="Snake: compiled, padded to 16 tokens, prompts kept; as --step compiled.")
    ] = False,
    fps: Annotated[
        float | None,
        typer.Option(help="Snake: moves a second.", show_default="12 in a terminal, else as many as there can be"),
    ] = None,
    max_speed: Annotated[
        bool, typer.Option("--max-speed", help="Snake: as many moves a second as there can be.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Let a model play without a notebook: a line per episode, then a summary; Ctrl-C says what was played."""
    from lab.experiments import live_play
    from lab.live import open_session
    from lab.live_choices import SNAKE, check_settings, choices
    from lab.moments import check_gif_path

    if game is not None and scenario is not None:
        raise InputError("Give either --game (Atari) or --scenario (Doom).")
    if steps < 1:
        raise InputError(f"--steps is {steps}; give the number of decisions to play, 1 or more.")
    name, _, board = (game or "").partition(":")
    snake = name.lower() == "snake"
    source = f"doom:{'basic' if scenario is None else scenario}" if game is None else f"atari:{game}"
    if snake:
        source = f"snake:{board}" if board else SNAKE
    (usual_model, *_), (usual_step, *_) = choices(source)
    if snake and optimize and step not in (None, "compiled"):
        raise InputError(f"--optimize is --step compiled; give it, or --step {step}, not both.")
    step = step or ("compiled" if optimize else usual_step)
    check_settings(step, frames, seed, source=source)
    if record is not None:
        check_gif_path(record)
    if not snake and (optimize or max_speed or fps is not None):
        raise InputError("--optimize, --fps and --max-speed go with --game snake.")
    if fps is not None and max_speed:
        raise InputError("Give --fps or --max-speed, not both.")
    if fps is not None and not 0 < fps < float("inf"):
        raise InputError(f"--fps is {fps:g}; give the number of moves a second, above 0.")

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    try:
        session = open_session(
            source,
            model=model or usual_model,
            **{"step": step, "device": device, "dtype": dtype, "frames": frames, "choose": choose, "seed": seed},
            say=lambda what: say(f"{what} ..."),
        )
    except KeyboardInterrupt:
        say("stopped before the first decision")
        raise typer.Exit(130) from None
    with session:
        code = live_play.watch(session, steps, say, sys.stdout.isatty() and not as_json, math.inf if max_speed else fps)
        found = live_play.summary(session)
        if record is not None and session.decisions:
            count = session.recording.save_gif(record)
            say(f"{count} pictures in {record}, {record.stat().st_size / 1e3:.0f} kB")
    print(json.dumps(found) if as_json else live_play.summary_text(found))
    raise typer.Exit(code)


@bench.command()
def latency(
    model: Annotated[str, typer.Option(help="A preset (smolvlm-256m, tiny), a checkpoint folder or a hub name.")] = (
        "smolvlm-256m"
    ),
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="The backbone's: fp32 or bf16.")] = "fp32",
    workload: Annotated[str, typer.Option(help="A workload's name.")] = "pong",
    hz: Annotated[float | None, typer.Option(help="Count missed deadlines at this many decisions a second.")] = None,
    as_json: Json = False,
    out: Out = None,
    weights: Weights = "default",
) -> None:
    """Time one decision and its stages: where the time goes, p50, p95, p99, missed deadlines, and a verdict."""
    if hz is not None and not 0 < hz < float("inf"):
        raise InputError(f"--hz is {hz}; give the number of decisions a second, above 0.")
    with _quiet(as_json, out):
        from lab.experiments.latency import bench as measure

        result = measure(model=model, device=device, dtype=dtype, workload=workload, hz=hz, out=out, weights=weights)
    _print_result(result, as_json)


BENCHES = {
    "graphs": (
        "lab.experiments.graphs",
        "Time eager, static, captured and compiled decisions beside each other, and say whether the answers are the same.",
    ),
    "question-first": (
        "lab.experiments.question_first",
        "Time the whole sequence, split, question first and the published simulation of it; say what the cache saves.",
    ),
    "resume": (
        "lab.experiments.resume",
        "Time the first token of a resumed prompt with and without encoding kept images again; compare the answers.",
    ),
    "levers": (
        "lab.experiments.lever_results",
        "Time what else is cheaper (dtype, batch, picture size, other runtimes, int8) and what it does to the answers.",
    ),
}


def _add_bench(name: str, module: str, told: str) -> None:
    @bench.command(name, help=told)
    def command(
        preset: Preset = None,
        device: Device = "cpu",
        dtype: Dtype = None,
        as_json: Json = False,
        out: Out = None,
        weights: Weights = "default",
    ) -> None:
        with _quiet(as_json, out):
            measure = import_module(module).bench
            result = measure(preset=preset, device=device, dtype=dtype, out=out, weights=weights)
        _print_result(result, as_json)


for name, (module, told) in BENCHES.items():
    _add_bench(name, module, told)


@bench.command()
def snake(
    preset: Annotated[
        str | None,
        typer.Option(help="snake (the trained checkpoint, the default), english, multilingual, tiny, a folder."),
    ] = None,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="The encoder's: fp32 or bf16.")] = "fp32",
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Time what compiling, padding and keeping prompts bring a Snake loop; compare actions, memory and games."""
    with _quiet(as_json, out):
        from lab.experiments.snake_results import bench as measure

        result = measure(preset=preset, device=device, dtype=dtype, out=out)
    _print_result(result, as_json)


@train.command("snake")
def train_snake(
    out: Annotated[Path, typer.Option(help="Folder that gets the two checkpoints, whole and tenth.")] = Path("snake"),
    seed: Annotated[int, typer.Option(help="Seed of the weights, the games and the order of the positions.")] = 0,
) -> None:
    """Teach two small text models to read the planner's words, the second from a tenth of the data: two minutes."""
    from lab.snake_training import Recipe, train

    for name, folder in train(Recipe(seed=seed), out).items():
        print(f"{name}: {folder}")


@train.command()
def pocket(
    out: Annotated[Path, typer.Option(help="Folder that gets one checkpoint per layout.")] = Path("pocket"),
    layout: Annotated[
        list[str] | None, typer.Option(help="terminator or question_first; may be repeated [default: both].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the games and the order of the examples.")] = 0,
) -> None:
    """Teach the pocket model Doom basic, Breakout and Pong from scripted experts: about half an hour on two cores."""
    from lab.training import Recipe, train

    recipe = Recipe(seed=seed, **({"layouts": tuple(layout)} if layout else {}))
    print(f"training {' and '.join(recipe.layouts)}; losses as they come: {out / 'training.rows.jsonl'}", flush=True)
    for name, folder in train(recipe, out).items():
        print(f"{name}: {folder}")


@app.command()
def gpu(
    out: Annotated[Path | None, typer.Option(help="Where the rows go; by default data/measured/<gpu>.")] = None,
) -> None:
    """Run every bench on a CUDA GPU, installing nothing; `make gpu` runs the GPU tests before it."""
    from lab.gpu import run as run_all

    raise typer.Exit(run_all(out))


def _print_result(result: Any, as_json: bool) -> None:
    """A bench's document as the last line, or its table and its verdict."""
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        print(result.table())
        print(result.verdict)


@contextlib.contextmanager
def _quiet(as_json: bool, out: Path | None = None) -> Iterator[None]:
    """With --json nothing but the document goes to stdout: what libraries print goes to stderr. `out` is this command's
    alone from its first comparison to its last."""
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if out is not None:
            import_module("lab.records").check_folder(out.parent)
            stack.enter_context(import_module("lab.locks").writing(out))
        yield


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right" if isinstance(rows[0][name], int | float) else "left")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _pair_parameters(arguments: list[str]) -> list[str]:
    """`-p NAME VALUE` as papermill writes it, turned into `-p NAME=VALUE`, which the option parser can take."""
    paired, rest = [], iter(arguments)
    for argument in rest:
        paired.append(argument)
        if argument in ("-p", "--parameter"):
            name = next(rest, None)
            if name is not None and "=" not in name:
                value = next(rest, None)
                name = name if value is None else f"{name}={value}"
            paired += [] if name is None else [name]
    return paired


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit code 2 and one sentence for bad input, else the command's own exit code."""
    try:
        app(_pair_parameters(sys.argv[1:] if arguments is None else arguments))
    except InputError as error:
        print(f"lab: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
