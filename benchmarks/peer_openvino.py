"""OpenVINO GenAI's ContinuousBatchingPipeline behind peer_wire: python peer_openvino.py MODEL.gguf PORT THREADS"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peer_wire import serve


class Pipeline:
    """peer_wire.Engine."""

    def __init__(self, model: str, threads: int) -> None:
        config = openvino_genai.SchedulerConfig()
        config.max_num_seqs, config.cache_size, config.enable_prefix_caching = 64, 4, True
        self._pipe = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._handles: dict[int, Any] = {}

    def add(self, number: int, input_ids: list[int], max_new_tokens: int) -> None:
        generation = openvino_genai.GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True, do_sample=False)
        ids = openvino.Tensor(np.array([input_ids], np.int64))
        self._handles[number] = self._pipe.add_request(number, ids, generation)

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        self._pipe.step()
        for number, handle in list(self._handles.items()):
            ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    ids += output.generated_ids
            ended = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if ids or ended:
                yield number, ids, ended
            if ended:
                del self._handles[number]

    def busy(self) -> bool:
        return bool(self._handles)


if __name__ == "__main__":
    serve(Pipeline(sys.argv[1], int(sys.argv[3])), int(sys.argv[2]))
