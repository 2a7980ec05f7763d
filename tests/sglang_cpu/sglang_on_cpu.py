"""A plugin of SGLang (its entry point is in sglang_on_cpu-1.0.dist-info): deterministic inference with torch_native on
a CPU. The random numbers of a request depend on its seed and position; matrix products stay those of the CPU."""


def register():
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
