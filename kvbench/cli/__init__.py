"""The `kvbench` command: one file per subcommand, heavy imports inside the functions."""

from __future__ import annotations

import os
import sys

import typer

from kvbench.errors import BadInputError, KVBenchError
from kvbench.ranks import OtherProcessError, is_main, processes

SHARED = ("calibrate", "evaluate")
"""Commands that several processes can share."""


def _app() -> typer.Typer:
    from kvbench._version import __version__
    from kvbench.cli import (
        calibrate,
        check,
        correlate,
        demo,
        diagnose,
        evaluate,
        fit,
        handoff,
        latency,
        mapper,
        plan,
        report,
        screen,
        sweep,
        sweep_pairs,
        tasks,
    )

    app = typer.Typer(
        name="kvbench",
        help="Evaluate cross-model KV cache transfer. The way of the data: check, calibrate, fit, evaluate, report.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )

    @app.callback(invoke_without_command=True)
    def root(context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        if processes() > 1 and context.invoked_subcommand not in (*SHARED, None):
            raise BadInputError(
                f"'kvbench {context.invoked_subcommand}' runs in one process, but {processes()} were started; only {' and '.join(SHARED)} can be shared"
            )
        if version:
            typer.echo(f"kvbench {__version__}")
            raise typer.Exit

    app.command("check")(check.check)
    app.command("plan")(plan.plan)
    app.command("calibrate")(calibrate.calibrate)
    app.command("fit")(fit.fit)
    app.command("evaluate")(evaluate.evaluate)
    app.command("report")(report.report)
    app.command("diagnose")(diagnose.diagnose)
    app.command("correlate")(correlate.correlate)
    app.command("sweep")(sweep.sweep)
    app.command("sweep-pairs")(sweep_pairs.sweep_pairs)
    app.command("handoff")(handoff.handoff)
    app.command("latency")(latency.latency)
    app.command("screen")(screen.screen)
    app.command("demo")(demo.demo)
    app.add_typer(mapper.app, name="mapper")
    app.add_typer(tasks.app, name="tasks")
    return app


def main() -> None:
    """Entry point; an error that the user can mend is one line and an exit status, without a traceback."""
    try:
        _app()()
    except KVBenchError as error:
        if not isinstance(error, OtherProcessError):  # that one has said it
            print(f"kvbench{'' if is_main() else ' (process ' + os.environ['RANK'] + ')'}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        # Many libraries write, each with an error class of its own; a full disk is never a fault of the program.
        if "No space left on device" not in str(error):
            raise
        print(f"kvbench: the disk is full ({' '.join(str(error).split())[:200]}); free some space and repeat the command", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("kvbench: interrupted; the same command goes on from the last checkpoint where there is one", file=sys.stderr)
        raise SystemExit(130) from None
