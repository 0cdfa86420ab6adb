"""The token oracle: a Runner without a model, so that everything but the model is tested in milliseconds.

Like a model, its next token is a function of the whole context and of nothing else, and it reads the context through req_to_token
and the slots: it keeps one id per slot as its "KV". So a slot that is shared wrongly, freed too early or written twice shows in
the output.

Its log-probabilities are a function of token and position (``fake_logprob``), so that it shows if they are given to another.

A prompt that is ``[vocab_size - 1, n, id_1, ..., id_n]`` is a script: its output is id_1 .. id_n, then the end-of-sequence token.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence

import numpy as np

from ..layers.late_mask import LateMask
from .model_config import load_model_config
from .step import NO_CHOICE, GroupSpec, ModelInfo, ProfileSpec, RunnerConfig, StepHandle, StepInput, TensorSpec, timed_step
from .worker import InlineWorker, ThreadWorker, Worker

DEFAULT_SLOTS = 65536
_BASE = np.uint64(0x9E3779B97F4A7C15)


def fake_logprob(position: int | np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """What the oracle gives as the log-probability of tokens at a position: float32, negative, different for nearly all."""
    values: np.ndarray = (-((31 * token_ids + 7 * position) % 997 + 1) / 128).astype(np.float32)
    return values


def embedding_id(embedding: np.ndarray, vocab_size: int) -> int:
    """The id that stands for an embedding, float32 [H]."""
    return zlib.crc32(embedding.tobytes()) % (vocab_size - 1)


def tensor_names(path: str) -> list[str]:
    """Names in a safetensors file. Raises ValueError if it is none, OSError if it is not there."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size < 100 << 20:
            raise ValueError("the tensors are no safetensors: the length of the header is out of range")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError("the tensors are no safetensors: the header is no object")
    return [name for name in header if name != "__metadata__"]


class OracleRunner:
    """Implements Runner with numpy. The model's config and tokenizer are real, its weights are never read."""

    def __init__(self, config: RunnerConfig) -> None:
        overrides = json.loads(config.json_model_override_args)
        model = load_model_config(config.model_path, context_length=config.context_length, overrides=overrides)
        self.info = ModelInfo(
            model_type=model.model_type,
            architectures=[model.architecture],
            vocab_size=model.vocab_size,
            context_len=model.context_len,
            eos_token_ids=list(model.eos_token_ids),
            bos_token_id=model.bos_token_id,
            hidden_size=model.hidden_size,
            dtype="int32",
            device="cpu",
            attention_backend="oracle",
            load_format="oracle",
            logit_processors=sorted(config.logit_processors),
            stages=config.ranks.pp_size,
            explain={"load_format": "oracle, as given: no weights are read"},
        )
        self._num_slots = config.max_total_tokens or DEFAULT_SLOTS
        self._page_size = config.page_size
        self._powers = _BASE ** np.arange(model.context_len + 1, dtype=np.uint64)
        self._salt = 0  # stands for the weights: what is computed with others is another KV
        self._worker: Worker = ThreadWorker() if config.overlap else InlineWorker()

    def max_cache_tokens(self) -> int:
        return self._num_slots // self._page_size * self._page_size

    def init_cache(self, num_slots: int, req_to_token: np.ndarray) -> None:
        self._slots = np.full(num_slots + self._page_size, -1, np.int64)
        self._salts = np.zeros(num_slots + self._page_size, np.uint64)  # the weights with which each slot was computed
        self._req_to_token = req_to_token
        self._sampled = np.zeros(req_to_token.shape[0], np.int64)  # the newest token of each row, for placeholders

    def launch(self, step: StepInput) -> StepHandle:
        return self._worker.submit(lambda: timed_step(lambda: self._run(step)))

    def update_weights(self, path: str, load_format: str, *, partial: bool) -> None:
        """Other tokens follow from here on, by the names of the tensors in the folder's model.safetensors."""
        names = tensor_names(os.path.join(path, "model.safetensors"))
        self._salt = zlib.crc32(" ".join(sorted(names)).encode())

    def join_group(self, spec: GroupSpec) -> None:
        raise ValueError("the token oracle has no weights")

    def leave_group(self, name: str) -> None:
        raise ValueError("the token oracle has no weights")

    def receive_weights(self, group: str, tensors: Sequence[TensorSpec], folder: str) -> str:
        raise ValueError("the token oracle has no weights")

    def read_weight(self, name: str, limit: int) -> list[float]:
        raise ValueError("the token oracle has no weights")

    def release_memory(self, tags: list[str]) -> None:
        if "kv_cache" in tags:
            self._slots[:] = -1

    def resume_memory(self, tags: list[str]) -> None:
        """There is nothing to allocate."""

    def start_profile(self, spec: ProfileSpec) -> None:
        raise ValueError("the token oracle runs no kernels that could be profiled")

    def stop_profile(self) -> str:
        raise ValueError("no profile is under way")

    def close(self) -> None:
        self._worker.close()

    def _run(self, step: StepInput) -> list[np.ndarray]:
        input_ids = np.where(step.input_ids < 0, self._sampled[np.maximum(-step.input_ids, 0)], step.input_ids)
        if len(input_ids) and not (input_ids.min() >= 0 and input_ids.max() < self.info.vocab_size):
            raise IndexError("an input id is outside the vocabulary")
        for span in step.embeds:
            ids = [embedding_id(row, self.info.vocab_size) for row in span.values]
            input_ids[span.start : span.start + len(ids)] = ids
        self._slots[step.out_cache_loc] = input_ids
        self._salts[step.out_cache_loc] = self._salt
        slots = (self._req_to_token[int(step.rows[i]), : int(step.seq_lens[i])] for i in step.sample_index)
        next_ids = np.fromiter((self._next(self._slots[own], self._salts[own]) for own in slots), np.int64, len(step.sample_index))
        self._avoid_banned(step, next_ids)
        if step.sampling.allowed is not None:
            self._follow(step.sampling.allowed, next_ids)
        self._sampled[step.rows[step.sample_index]] = np.maximum(next_ids, 0)
        return [next_ids, *self._logprobs(step, next_ids), *self._hidden(step, input_ids)]

    @staticmethod
    def _hidden(step: StepInput, input_ids: np.ndarray) -> list[np.ndarray]:
        """Position and id of each token, as states of two numbers."""
        if not step.hidden:
            return []
        firsts = step.seq_lens - np.cumsum(step.extend_lens)
        states = []
        for span in step.hidden:
            at = np.arange(span.start, span.start + span.count)
            states.append(np.stack([firsts[span.index] + at, input_ids[at]], axis=1).astype(np.float32))
        return [np.concatenate(states).ravel()]

    def _logprobs(self, step: StepInput, next_ids: np.ndarray) -> list[np.ndarray]:
        """What unpack_logprobs takes; nothing if nothing is asked for."""
        values: list[np.ndarray] = []
        top_ids: list[np.ndarray] = []
        ids = np.arange(self.info.vocab_size)
        firsts = step.seq_lens - np.cumsum(step.extend_lens)  # position of the first token of the step, if it were the request's
        for request in (*step.prompt_logprobs, *step.sampled_logprobs):
            if request.targets is None:
                targets, first = next_ids[request.index : request.index + 1], int(step.seq_lens[step.sample_index[request.index]])
            else:
                targets, first = request.targets, int(firsts[request.index]) + request.start + 1
            positions = first + np.arange(len(targets))
            scores = [fake_logprob(position, ids) for position in positions.tolist()]
            best = [np.argsort(-score, kind="stable")[: request.top_num] for score in scores]
            values += [fake_logprob(positions, targets)]
            values += [score[chosen] for score, chosen in zip(scores, best, strict=True)]
            values += [score[request.token_ids] for score in scores]
            top_ids += best
        if not values:
            return [np.empty(0, np.float32), np.empty(0, np.int32)] if step.hidden else []
        return [np.concatenate(values), np.concatenate(top_ids).astype(np.int32)]

    def _next(self, ids: np.ndarray, salts: np.ndarray) -> int:
        vocab_size = self.info.vocab_size
        if ids[0] == vocab_size - 1 and len(ids) > 1:
            position = len(ids) - 2 - int(ids[1])
            return int(ids[2 + position]) if 0 <= position < ids[1] else self.info.eos_token_ids[0]
        digest = int((((ids + 1).astype(np.uint64) + salts) * self._powers[: len(ids)]).sum())
        return (digest >> 17) % (vocab_size - 1)

    def _follow(self, mask: LateMask, next_ids: np.ndarray) -> None:
        """A token that is not allowed becomes the next one above that is, going round at the end; NO_CHOICE if none is."""
        for row, allowed in zip(mask.rows.tolist(), mask.allowed(self.info.vocab_size), strict=True):
            ids = np.flatnonzero(allowed)
            if not len(ids):
                next_ids[row] = NO_CHOICE
            elif not allowed[next_ids[row]]:
                next_ids[row] = ids[np.searchsorted(ids, next_ids[row]) % len(ids)]

    @staticmethod
    def _avoid_banned(step: StepInput, next_ids: np.ndarray) -> None:
        """A banned token becomes its smallest neighbour above that is not banned."""
        for row in np.unique(step.sampling.banned_rows):
            banned = set(step.sampling.banned_ids[step.sampling.banned_rows == row].tolist())
            while int(next_ids[row]) in banned:
                next_ids[row] += 1
