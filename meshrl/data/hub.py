"""Whether the Hugging Face hub can be reached. Transformers' loaders try again and again for half a minute, file by
file, and then name a file instead of the cause."""

from __future__ import annotations

from pathlib import Path

from meshrl.config.source import HUB_ID
from meshrl.core.errors import DataError


def require_reachable(name: str) -> None:
    """For a hub id, unless it is a folder or has files in the hub's cache of this machine: one request, not repeated.

    Raises: DataError when the hub does not answer. The loaders name the cause if it answers with an error.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    if not HUB_ID.fullmatch(name) or Path(name).is_dir() or try_to_load_from_cache(name, "config.json") is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HfHubHTTPError:
        return
    except (HTTPError, OSError) as cause:
        offline = isinstance(cause, OfflineModeIsEnabled)
        reason = "is not asked in offline mode (HF_HUB_OFFLINE)" if offline else f"can't be reached: {cause}"
        raise DataError(
            f"{name!r} is neither a folder nor in the hub's cache of this machine, and the Hugging Face hub {reason}. "
            f"Download the model first, on a machine that reaches the hub (hf download {name} --local-dir FOLDER), and "
            "give its folder in place of the name: model.path=FOLDER"
        ) from cause
