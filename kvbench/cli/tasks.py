"""`kvbench tasks ls` and `kvbench tasks export`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli import options as opt

app = typer.Typer(help="lm-eval tasks that kvbench brings, and stock tasks from local rows.", no_args_is_help=True)


@app.command("ls")
def ls(
    json: opt.Json = False,
    include_path: Annotated[bool, typer.Option("--include-path", help="Print just the folder, for `lm_eval --include_path`.")] = False,
) -> None:
    """List kvbench's own tasks and the folder to give to `lm_eval --include_path`."""
    import yaml

    from kvbench.paths import tasks_directory

    folder = tasks_directory()
    if include_path:
        print(folder)
        return
    rows = []
    for path in sorted(folder.glob("*.yaml")):
        # Task files carry lm-eval's !function tag; only their names are of interest here.
        class Names(yaml.SafeLoader):
            pass

        Names.add_multi_constructor("!", lambda loader, suffix, node: None)
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=Names)
        rows.append({"name": content.get("task") if isinstance(content.get("task"), str) else content.get("group"), "file": str(path)})
    if json:
        print(json_module.dumps({"include_path": str(folder), "tasks": rows}, indent=2, sort_keys=True))
        return
    print(f"include path: {folder}")
    for row in rows:
        print(f"  {row['name']}")


@app.command("export")
def export(
    data_dir: Annotated[Path, typer.Option(help="Folder of local rows, <task or data set>/<split>.jsonl in the schema of the hub data set.")],
    out: Annotated[Path, typer.Option(help="Folder for the task files; what an earlier export wrote there is replaced.")],
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval names, comma separated, and mmlu_available; default: what kvxfer_suite has data for.")
    ] = None,
    include_path: Annotated[list[Path] | None, typer.Option(help="Further folder of task files; repeatable.")] = None,
    json: opt.Json = False,
) -> None:
    """Write task files that read local rows, for the plain lm_eval command. They name files of this machine: export again on another."""
    opt.quiet_libraries()
    from kvbench.errors import BadInputError
    from kvbench.scoring.offline import data_fingerprint, overlays, tasks_with_data

    names = [name.strip() for name in tasks.split(",") if name.strip()] if tasks is not None else tasks_with_data(data_dir)
    if not names:
        raise BadInputError(
            f"'{data_dir}' has rows for no task of kvxfer_suite; name the tasks with --tasks"
            if tasks is None
            else "--tasks is empty; name one or more"
        )
    written = overlays(names, data_dir, out, include=include_path or ())
    folder = out.resolve()
    if json:
        rows = [
            {
                "data_fingerprint": data_fingerprint(overlay),
                "file": str(overlay.path.resolve()),
                "files": {split: str(file) for split, file in overlay.files.items()},
                "name": overlay.task,
                "note": overlay.note,
            }
            for overlay in written
        ]
        print(json_module.dumps({"include_path": str(folder), "tasks": rows, "names": names}, indent=2, sort_keys=True))
        return
    for overlay in written:
        print(f"{overlay.task}{f'  ({overlay.note})' if overlay.note else ''}")
    print(f"--include_path {folder} --tasks {','.join(names)}")
    opt.say("the last line is for lm_eval; HF_HUB_OFFLINE=1 and HF_DATASETS_OFFLINE=1 make sure that nothing else asks the hub")
