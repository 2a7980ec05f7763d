"""`meshrl diagnose`: profile some steps of a config, or read traces; print a summary, and write the files."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from meshrl.core.errors import ConfigError
from meshrl.core.files import is_there, output_errors, write_text
from meshrl.monitor.trace import FOLDER
from meshrl.tools.diagnose.diagnosis import as_record, diagnose, write_perfetto
from meshrl.tools.diagnose.page import page
from meshrl.tools.diagnose.read import read_trace
from meshrl.tools.diagnose.text import summary
from meshrl.tools.page.document import write_page

REMEDY = "Make room, or give another folder by --out"
TRACE_ENDS = (".json", ".json.gz")


def run(target: Path, overrides: Sequence[str], num_steps: int, out: Path | None) -> str:
    """Diagnose a config (a YAML file), a run's folder or a trace; returns the summary.

    out: folder of the files; by default the run's, or that of the trace. Raises: MeshrlError, among them ConfigError.
    """
    if not is_there(target):
        raise ConfigError(f"{target}: no such file or folder; give a config, the folder of a run, or a trace")
    is_trace = target.is_dir() or target.name.endswith(TRACE_ENDS)
    if is_trace and overrides:
        raise ConfigError(f"{overrides[0]}: values override those of a config, but {target} is a trace; remove them")
    folder = target if is_trace else _profile(target, overrides, num_steps)
    if not is_trace:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a run always saves its end
    trace = read_trace(folder)
    found = diagnose(trace)
    at = out or (folder.parent if folder.is_file() or folder.name == FOLDER else folder)
    with output_errors(at, REMEDY):
        at.mkdir(parents=True, exist_ok=True)
    with output_errors(at / "diagnose.json", REMEDY):
        write_text(at / "diagnose.json", json.dumps(as_record(found), indent=1) + "\n")
    written = [at / "diagnose.json", write_perfetto(at / "diagnose.perfetto.json.gz", trace)]
    written.append(write_page(at / "diagnose.html", page(trace, found)))
    return summary(found) + "\n\nwrote " + ", ".join(str(path) for path in written)


def _profile(config: Path, overrides: Sequence[str], num_steps: int) -> Path:
    """Run the first steps of a config in a folder of its own, without evaluations and checkpoints; returns the folder.
    Two steps come before those with the profiler, and give its slow-down."""
    from meshrl.run import start
    from meshrl.run.inputs import load_run, load_sft, show_notices

    name = f"run.name=diagnose-{time.strftime('%Y%m%d-%H%M%S')}"
    ours = [*overrides, f"monitor.trace_steps={num_steps}", name, "run.resume=never"]
    limits = [f"num_steps={num_steps + 2}", "save_every_steps=0"]
    try:
        of_loop = [f"loop.{limit}" for limit in (*limits, "eval_every_steps=0")]
        loaded = load_run(config, [*ours, *of_loop, "data.eval_path=null"])
    except ConfigError as refused:
        if "`meshrl sft`" not in str(refused):  # as which the message recognizes the config
            raise
        sft = load_sft(config, [*ours, *(f"sft.{limit}" for limit in limits)])
        return start.sft(sft, lambda _: None)
    show_notices(loaded)
    return start.train(loaded, lambda _: None)
