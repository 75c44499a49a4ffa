"""One rank of the example, told by torchrun's variables who it is: run with `given`, the rank, how many there
are, the port where they meet, the file for what it prints, and the example's arguments."""

import contextlib
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[3] / "examples" / "train_on_ranks.py"


def main(rank: int, ranks: int, port: int, said: Path, arguments: list[str]) -> None:
    about: dict[str, Any] = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "localhost", "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in about.items()})
    sys.argv = [str(FILE), *arguments]
    with said.open("w") as file, contextlib.redirect_stdout(file):
        try:
            runpy.run_path(str(FILE), run_name="__main__")
        except BaseException:
            print(traceback.format_exc())
            raise


if __name__ == "__main__":
    main(*given)  # noqa: F821  (a global that `runpy` was given)
