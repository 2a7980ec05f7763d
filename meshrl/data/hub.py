"""Whether the Hugging Face hub can be reached. Transformers' loaders and `datasets` ask again and again for half a
minute, file by file, and then may report a file instead of the cause."""

from __future__ import annotations

from pathlib import Path

from meshrl.config.source import HUB_ID
from meshrl.core.errors import DataError


def unreachable(name: str, file: str, repo_type: str) -> str | None:
    """Why the hub does not answer one request for a file; None if it answers, also with an error, which the loaders
    report."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=repo_type))
    except (HfHubHTTPError, OfflineModeIsEnabled) as error:
        return "is not asked in offline mode (HF_HUB_OFFLINE)" if isinstance(error, OfflineModeIsEnabled) else None
    except (HTTPError, OSError) as cause:
        return f"can't be reached: {cause}"
    return None


def require_reachable(name: str) -> None:
    """For the hub id of a model, unless it is a folder or has files in the hub's cache of this machine.

    Raises: DataError when the hub does not answer.
    """
    from huggingface_hub import try_to_load_from_cache

    if not HUB_ID.fullmatch(name) or Path(name).is_dir() or try_to_load_from_cache(name, "config.json") is not None:
        return
    if (reason := unreachable(name, "config.json", "model")) is not None:
        raise DataError(
            f"{name!r} is neither a folder nor in the hub's cache of this machine, and the Hugging Face hub {reason}. "
            f"Download the model first, on a machine that reaches the hub (hf download {name} --local-dir FOLDER), and "
            "give its folder in place of the name: model.path=FOLDER, or --model FOLDER"
        )
