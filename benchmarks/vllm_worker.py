"""vLLM's part of serving.py, which starts this with the Python of an environment that has vLLM.

    VLLM_PYTHON benchmarks/vllm_worker.py FOLDER [--processor]

FOLDER is an exported model. Each line of stdin is a request, {"prompts": [[id, ...], ...], "tokens": N}; each line of
stdout the answer, {"texts": [[id, ...], ...], "seconds": S}; the first one, when the model is loaded, is its version.
"""

import json
import os
import sys
import time


def main() -> None:
    folder, by_processor = sys.argv[1], "--processor" in sys.argv[2:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints, too
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    now_s = time.process_time if by_processor else time.perf_counter
    import vllm

    if by_processor:
        import torch

        torch.set_num_threads(1)
    # Each round has the same prompts: nothing of them may be left from the last one.
    model = vllm.LLM(
        model=folder, dtype="float32", skip_tokenizer_init=True, max_model_len=1024, enable_prefix_caching=False
    )

    def answer(content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer(vllm.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        settings = vllm.SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        began_s = now_s()
        outputs = model.generate(prompts, settings, use_tqdm=False)
        seconds = now_s() - began_s
        answer({"texts": [list(each.outputs[0].token_ids) for each in outputs], "seconds": seconds})


if __name__ == "__main__":
    main()
