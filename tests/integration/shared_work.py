"""Run kvbench commands one after another in this process: `shared_work.py JSON`, alone or under torchrun.

The JSON is a list of commands; `FAIL_AT` of the environment ends process 1 in its n-th calibration batch, as a crash would.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    import torch

    torch.set_num_threads(1)
    from typer.main import get_command

    from kvbench.calibration import harvest
    from kvbench.cli import _app

    harvest.CHUNK_ROWS = 512
    fail_at = int(os.environ.get("FAIL_AT", "0"))
    whole, count = harvest.Harvest._features, 0

    def counted(self, *arguments):
        nonlocal count
        count += 1
        if count == fail_at and self.ranks.rank == 1:
            os._exit(9)
        return whole(self, *arguments)

    harvest.Harvest._features = counted
    for command in json.loads(sys.argv[1]):
        get_command(_app()).main(args=command, prog_name="kvbench", standalone_mode=False)


main()
