"""Published figures to set beside measured ones: one small CSV each in data/published, with its source on top."""

import pandas as pd

from lab.errors import InputError
from lab.workloads import DATA

NO_MEASUREMENT = "no measurement: "


def published(name: str) -> pd.DataFrame:
    """The published table `name` (a file name in data/published without .csv).

    Its comment lines, the first of which names the source, are in `.attrs["source"]`. Where nothing can be measured
    beside it, one of them says why, and `.attrs["no_measurement"]` is that reason; else "". InputError for an unknown
    name.
    """
    path = DATA / "published" / f"{name}.csv"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.csv")))
        raise InputError(f"There is no published table {name!r}; there are {known}.")
    table = pd.read_csv(path, comment="#")
    comments = [line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#")]
    reasons = [line.removeprefix(NO_MEASUREMENT) for line in comments if line.startswith(NO_MEASUREMENT)]
    table.attrs |= {"source": "\n".join(comments), "no_measurement": "\n".join(reasons)}
    return table
