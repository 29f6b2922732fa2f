"""`kvbench tasks ls`."""

from __future__ import annotations

import json as json_module

import typer

from kvbench.cli import options as opt

app = typer.Typer(help="lm-eval tasks that kvbench brings.", no_args_is_help=True)


@app.command("ls")
def ls(json: opt.Json = False) -> None:
    """List kvbench's own tasks and the folder to give to `lm_eval --include_path`."""
    import yaml

    from kvbench.paths import tasks_directory

    folder = tasks_directory()
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
