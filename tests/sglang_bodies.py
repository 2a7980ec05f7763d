"""Request bodies of SGLang's endpoints, checked strictly: an unknown field or a wrong type is an error."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Sampling(Strict):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    stream_interval: int | None = None
    skip_special_tokens: bool = True


class Generate(Strict):
    rid: str
    input_ids: list[int]
    sampling_params: Sampling
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_prompt_token_ids: bool = False
    stream: bool = False


class UpdateFromTensor(Strict):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Literal["target", "draft", "all"] = "all"
    torch_empty_cache: bool = False


class UpdateFromDisk(Strict):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateVersion(Strict):
    new_version: str
    abort_all_requests: bool = True


class Selected(Strict):
    selector: Literal["target", "draft", "all"] = "all"


class Nothing(Strict):
    pass


class Pause(Strict):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(Strict):
    torch_empty_cache: bool = True


class Memory(Strict):
    tags: list[Literal["weights", "kv_cache"]] | None = None


class Abort(Strict):
    rid: str | None = None
    abort_all: bool = False


class Completion(Strict):
    model: str
    prompt: list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    stream: bool = False
    return_token_ids: bool = False


class StandInFault(Strict):
    fault: str = ""
    path: str = ""
    names: list[str] = []
    release: str = "0.5.23"
