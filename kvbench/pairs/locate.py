"""From what a user typed to a configuration and a tokenizer: hub id, directory, GGUF file, or a member of the embedded family."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvbench.errors import BadInputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

HUB_TIMEOUT_SECONDS = 10.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class ModelRef:
    """Where a model is.

    Attributes:
        name: As the user typed it.
        path: Hub id or local directory, for `from_pretrained`.
        gguf_file: File name inside `path`, for a GGUF model.
        revision: Hub revision; None for the default, and for anything local.
    """

    name: str
    path: str
    gguf_file: str | None = None
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether `path` is a directory on this machine."""
        return os.path.isdir(self.path)


def resolve(name: str, revision: str | None = None) -> ModelRef:
    """Find out what a name stands for. Nothing is read but the names of files, and no network is used.

    Args:
        name: A hub id, a directory, a path to a .gguf file, or `embedded:source`, `embedded:target`, `embedded:stranger`.
        revision: A revision of a hub id. `main` is allowed everywhere, being lm-eval's default.

    Raises:
        BadInputError: nothing is there, it is no model, or a revision is given for something local.
    """
    typed = name.strip()
    if not typed:
        raise BadInputError("the name of a model is empty; give a hub id, a directory, a .gguf file or embedded:target")
    if typed.startswith("embedded:"):
        from kvbench.embedded import member_path

        found = ModelRef(typed, str(member_path(typed.removeprefix("embedded:"))))
    else:
        path = Path(os.path.expanduser(typed))
        if os.path.isfile(path):
            found = _gguf(typed, path)
        elif os.path.isdir(path):
            found = _directory(typed, path)
        else:
            return _hub(typed, revision)
    if revision not in (None, "main"):
        raise BadInputError(f"revision '{revision}' is given for '{typed}', which is local; drop the revision, or give a hub id")
    return found


def load_config(ref: ModelRef, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read a model's configuration.

    Args:
        ref: Where the model is.
        trust_remote_code: Run configuration code of the repository.

    Raises:
        BadInputError: the hub is out of reach, the repository is unknown or gated, or the file cannot be used.
    """
    from transformers import AutoConfig

    if ref.is_local and ref.gguf_file is None:
        _check_config_file(ref, trust_remote_code)
    return _load(ref, "configuration", AutoConfig.from_pretrained, trust_remote_code)


def load_tokenizer(ref: ModelRef, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Read a model's tokenizer.

    Args:
        ref: Where the model is.
        trust_remote_code: Run tokenizer code of the repository.

    Raises:
        BadInputError: the hub is out of reach, the repository is unknown or gated, or there is no usable tokenizer.
    """
    from transformers import AutoTokenizer

    if ref.is_local and ref.gguf_file is None and not any(Path(ref.path, file).is_file() for file in _TOKENIZER_FILES):
        raise BadInputError(f"'{ref.name}' has no tokenizer (no tokenizer.json in {ref.path}); save the model's tokenizer there too")
    return _load(ref, "tokenizer", AutoTokenizer.from_pretrained, trust_remote_code)


def _gguf(name: str, path: Path) -> ModelRef:
    if path.suffix.lower() != ".gguf":
        raise BadInputError(f"'{name}' is a file but no .gguf file; give the model's directory, or a .gguf file")
    return ModelRef(name, str(path.parent), path.name)


def _directory(name: str, path: Path) -> ModelRef:
    if not (path / "config.json").is_file():
        files = sorted(entry.name for entry in path.glob("*.gguf"))
        remedy = f"give the GGUF file itself, for instance {path / files[0]}" if files else "give the directory that save_pretrained wrote"
        raise BadInputError(f"directory '{name}' has no config.json, so it is no model; {remedy}")
    return ModelRef(name, str(path))


def _hub(name: str, revision: str | None) -> ModelRef:
    if name.startswith(("./", "../", "/", "~")) or name.count("/") > 1 or name in {".", ".."} or name.lower().endswith(".gguf"):
        raise BadInputError(f"there is no directory or file '{name}'; check the path, or give a hub id such as org/model")
    if not _HUB_ID.fullmatch(name) or "--" in name or ".." in name:
        raise BadInputError(
            f"'{name}' is neither an existing path nor a hub id (org/model, of letters, digits, '-', '_' and '.'); check the spelling"
        )
    return ModelRef(name, name, revision=revision)


def _check_config_file(ref: ModelRef, trust_remote_code: bool) -> None:
    path = Path(ref.path, "config.json")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"'{ref.name}': {path} is not a readable JSON file ({_first_line(error)}); restore it from the model's source") from error
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str):
        raise BadInputError(f"'{ref.name}': {path} states no model_type; it is no transformers model, or its config.json is damaged")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind in CONFIG_MAPPING or (trust_remote_code and settings.get("auto_map")):
        return
    if settings.get("auto_map"):
        raise BadInputError(_needs_code(ref))
    import transformers

    raise BadInputError(
        f"'{ref.name}': model_type '{kind}' is unknown to transformers {transformers.__version__}; correct {path}, or install a newer transformers"
    )


def _load(ref: ModelRef, what: str, loader: Callable[..., _Loaded], trust_remote_code: bool) -> _Loaded:
    options: dict[str, object] = {"trust_remote_code": trust_remote_code}
    if ref.gguf_file is not None:
        _check_gguf_reader(ref)
        options["gguf_file"] = ref.gguf_file
    if not ref.is_local:
        options["revision"] = ref.revision or "main"
        if not _hub_answers(ref):
            options["local_files_only"] = True
    try:
        return loader(ref.path, **options)
    except Exception as error:
        # Readers of foreign files raise whatever they stumble over, bare Exception included (the tokenizers library does).
        raise BadInputError(_explain(ref, what, error)) from error


def _check_gguf_reader(ref: ModelRef) -> None:
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise BadInputError(f"'{ref.name}' is a GGUF file, and the package that reads them is missing; pip install 'kvbench[gguf]'")


@functools.lru_cache(maxsize=32)
def _hub_answers(ref: ModelRef) -> bool:
    """Ask the hub once, because transformers retries an unreachable hub for half a minute per file.

    Returns:
        False if the hub is out of reach but its files are in the local cache.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        HfApi().model_info(ref.path, revision=ref.revision, timeout=HUB_TIMEOUT_SECONDS)
    except GatedRepoError as error:
        raise BadInputError(_gated(ref)) from error
    except RevisionNotFoundError as error:
        raise BadInputError(f"'{ref.name}' has no revision '{ref.revision}' on the hub; check the revision") from error
    except RepositoryNotFoundError as error:
        remedy = "check the spelling, log in with `hf auth login` if it is private, or give a local directory"
        raise BadInputError(f"'{ref.name}' is neither a local path nor a model on the hub; {remedy}") from error
    except Exception as error:
        # The kind of a network error depends on the HTTP client that the installed hub library uses.
        if isinstance(try_to_load_from_cache(ref.path, "config.json", revision=ref.revision or "main"), str):
            return False
        remedy = f"download it where there is a network (`hf download {ref.path} --local-dir DIR`) and give DIR"
        raise BadInputError(
            f"'{ref.name}' is no local path, the hub cannot be reached ({_first_line(error)}), and it is not in the local cache; {remedy}"
        ) from error
    return True


def _explain(ref: ModelRef, what: str, error: BaseException) -> str:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    names = {type(link).__name__ for link in chain}
    text = str(error)
    if "GatedRepoError" in names or "gated repo" in text:
        return _gated(ref)
    if "trust_remote_code" in text:
        return _needs_code(ref)
    if isinstance(error, ImportError):
        return f"cannot read the {what} of '{ref.name}': {_first_line(error)}; install what is missing"
    remedy = "check the file" if ref.gguf_file else f"check the files of {ref.path}, or fetch them again"
    return f"cannot read the {what} of '{ref.name}': {_first_line(error)}; {remedy}"


def _gated(ref: ModelRef) -> str:
    return f"'{ref.name}' is gated on the hub; accept its terms at https://huggingface.co/{ref.path} and log in with `hf auth login`"


def _needs_code(ref: ModelRef) -> str:
    return f"'{ref.name}' needs code from its own repository; read that code, then allow it (--trust-remote-code, or trust_remote_code=True)"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}" if lines else type(error).__name__
