"""`meshrl diagnose`: profile some steps of a config, or read traces; print a summary, and write the files."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from meshrl.config.load import is_sft
from meshrl.core.errors import ConfigError
from meshrl.core.files import is_there, output_errors, write_text
from meshrl.core.terminal import print_message
from meshrl.monitor.trace import FOLDER
from meshrl.tools.diagnose.diagnosis import as_record, diagnose, perfetto
from meshrl.tools.diagnose.page import page
from meshrl.tools.diagnose.read import read_trace
from meshrl.tools.diagnose.text import summary
from meshrl.tools.page.document import write_page


def run(target: Path, overrides: Sequence[str], num_steps: int, out: Path | None) -> str:
    """Diagnose a config (a YAML file), a run's folder or a trace; returns the summary.

    out: folder of the files; by default the run's, or that of the trace. Raises: MeshrlError, among them ConfigError.
    """
    if not is_there(target):
        raise ConfigError(f"{target}: no such file or folder; give a config, the folder of a run, or a trace")
    if not target.is_dir() and not target.name.endswith((".json", ".json.gz")):
        target = _profile(target, overrides, num_steps)
    elif overrides:
        raise ConfigError(f"{overrides[0]}: values override those of a config, but {target} is a trace; remove them")
    diagnosis = diagnose(read_trace(target))
    source = diagnosis.trace.source
    at = out or (source.parent if source.is_file() or source.name == FOLDER else source)
    numbers, events, html = (at / f"diagnose.{end}" for end in ("json", "perfetto.json.gz", "html"))
    with output_errors(at, "Make room, or give another folder by --out"):
        at.mkdir(parents=True, exist_ok=True)
        write_text(numbers, json.dumps(as_record(diagnosis), indent=1) + "\n")
        events.write_bytes(perfetto(diagnosis.trace))
    write_page(html, page(diagnosis))
    return "\n".join([*summary(diagnosis), "", f"wrote {numbers}, {events}, {html}"])


def _profile(config: Path, overrides: Sequence[str], num_steps: int) -> Path:
    """Run the first steps of a config in a folder of its own, which has only the traces afterwards; returns the folder.
    There are no evaluations and no checkpoints. Two steps come before those with the profiler, and give its slow-down.
    If the run fails, its folder stays as it is."""
    from meshrl.run import start
    from meshrl.run.inputs import Objects, load_run, load_sft

    count = num_steps + 2
    name = f"run.name={config.stem}-diagnose-{time.strftime('%Y%m%d-%H%M%S')}"  # one in the overrides comes first
    common = [name, *overrides, f"monitor.trace_steps={num_steps}", "monitor.sinks=[]", "run.resume=never"]
    if is_sft(config):
        sft = load_sft(config, [*common, f"sft.num_steps={count}"])
        settings, begin = sft.config.run, partial(start.sft, sft)
    else:
        of_loop = [f"loop.num_steps={count}", "loop.eval_every_steps=0", "data.eval_path=null"]
        loaded = load_run(config, [*common, *of_loop])
        settings, begin = loaded.config.run, partial(start.train, loaded)
    if is_there(folder := Path(settings.folder) / settings.name):
        raise ConfigError(f"{folder} exists, but the steps run in a new folder; choose another run.name")
    print_message(f"{config}: runs {count} steps; torch.profiler records the last {num_steps} of them")
    quiet = Objects(quiet=True, saves=False, on_step=lambda step, _: print_message(f"step {step} of {count}"))
    folder = begin(lambda _: None, quiet)
    for path in folder.iterdir() if is_there(folder / FOLDER) else ():
        if path.name != FOLDER:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder
