"""The embedded family: tiny models of our own, a pair that transfers and a pair that does not, and the world they know."""

from __future__ import annotations

from pathlib import Path

from kvbench.errors import BadInputError

MEMBERS: tuple[str, ...] = ("source", "target", "stranger")


def member_path(name: str) -> Path:
    """The folder of an embedded model, in Hugging Face format.

    Args:
        name: One of `MEMBERS`, without the `embedded:` that marks it on the command line.

    Returns:
        The folder with config.json, the weights and the tokenizer.

    Raises:
        BadInputError: There is no such member, or the installation lacks its files.
    """
    if name not in MEMBERS:
        raise BadInputError(f"there is no embedded model {name!r}; there are {', '.join(f'embedded:{member}' for member in MEMBERS)}")
    folder = Path(__file__).parent / "models" / name
    if not (folder / "config.json").is_file():
        raise BadInputError(f"the files of embedded:{name} are missing from {folder}; reinstall kvbench or run python -m kvbench.embedded.train")
    return folder
