"""A trained model behind lm-eval's interface: log-likelihoods of continuations and whole texts, and generated text.

    lm = TrainedLM(*open_trained("runs/laptop"), batch_size=16)
    lm_eval.simple_evaluate(lm, tasks=["aiscale_rolling"], task_manager=...)     # or evaluate(), see command

A context that does not fit the model's window W loses its oldest tokens. A text longer than W is scored in windows in
which each token is predicted once (lm-eval's own windows, so the numbers equal those of its class for transformers).

Shapes: B sequences of a batch, T tokens, K tokens of a continuation, D width, V vocabulary.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from aiscale.config import ConfigError
from aiscale.data import Tokenizer
from aiscale.model import GPT
from aiscale.model.build import HFModel
from aiscale.train.evaluate.tokenizer import end_of_text


class TrainedLM(TemplateLM):
    """lm-eval's LM over a trained model and its tokenizer, on one device."""

    def __init__(self, model: GPT | HFModel, tokenizer: Tokenizer, *, batch_size: int = 8, device: str = "cpu") -> None:
        super().__init__()
        self.model, self.text = model.to(device).eval(), tokenizer
        self.batch_size, self._device = batch_size, torch.device(device)
        self.max_length = model.config.max_seq_len

    @property
    def eot_token_id(self) -> int:
        """The token before a text without a context."""
        return end_of_text(self.text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self.text.encode(string)

    # log-likelihoods --------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each (key, context, continuation)."""
        # Longest first: batches are padded to their longest sequence, so if memory runs out, it does at once.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        answers: list = [None] * len(requests)
        for start in tqdm(range(0, len(order), self.batch_size), desc="scoring", disable=disable_tqdm):
            chunk = order[start : start + self.batch_size]
            scores = self._score([requests[i][1:] for i in chunk])
            for i, answer in zip(chunk, scores, strict=True):
                answers[i] = answer
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return answers

    @torch.inference_mode()
    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows = [torch.tensor(self._cut(context, continuation)) for context, continuation in pairs]
        # Padding is on the right, where causal attention does not see it.
        tokens = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True).to(self._device)  # (B,T)
        states = self._states(tokens)
        answers = []
        for row, state, (_, continuation) in zip(rows, states, pairs, strict=True):
            end, K = len(row) - 1, len(continuation)
            targets = row[-K:].to(self._device)  # (K,)
            logp = self._logits(state[end - K : end]).float().log_softmax(dim=-1)  # (K,V)
            total = logp.gather(1, targets[:, None]).sum(dtype=torch.float64)
            answers.append((total.item(), bool((logp.argmax(dim=-1) == targets).all())))
        return answers

    def _cut(self, context: list[int], continuation: list[int]) -> list[int]:
        """Context and continuation, without the oldest tokens of the context that do not fit the window."""
        if not 0 < len(continuation) <= self.max_length:
            raise ConfigError(
                f"a continuation has {len(continuation)} tokens, but this model scores 1 to {self.max_length} at once "
                "(model.max_seq_len): leave the task out, or train with a longer window"
            )
        return (context + continuation)[-(self.max_length + 1) :]

    def _states(self, tokens: Tensor) -> Tensor:
        """GPT: (B,T,D) before the head, which is then applied to the continuation only; transformers: (B,T,V)."""
        return self.model.hidden(tokens) if isinstance(self.model, GPT) else self.model(tokens)

    def _logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.model.head_weight) if isinstance(self.model, GPT) else states

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text; every token is predicted once."""
        windows, owners = [], []
        for owner, (text,) in enumerate(request.args for request in requests):
            parts = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            found = [(None, *make_disjoint_window(part)) for part in parts]
            windows += found
            owners += [owner] * len(found)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (score, _) in zip(owners, scores, strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # text -------------------------------------------------------------------------------------------------------------

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to its first stop string or the end of a document."""
        groups: dict[str, list[int]] = {}  # requests with the same settings
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        answers = [""] * len(requests)
        for group in groups.values():
            group.sort(key=lambda i: -len(requests[i].args[0]))
            for start in tqdm(range(0, len(group), self.batch_size), desc="generating", disable=disable_tqdm):
                chunk = group[start : start + self.batch_size]
                contexts = [requests[i].args[0] for i in chunk]
                for i, text in zip(chunk, self._generate(contexts, requests[chunk[0]].args[1]), strict=True):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return answers

    def _generate(self, contexts: list[str], settings: dict) -> list[str]:
        settings = normalize_gen_kwargs(copy.deepcopy(settings))
        new = min(settings["max_gen_toks"], self.max_length - 1)
        room = self.max_length - new
        prompts = [(self.tok_encode(context) or [self.prefix_token_id])[-room:] for context in contexts]
        texts = self.model.generate(
            [torch.tensor(prompt, device=self._device) for prompt in prompts],
            new,
            temperature=settings.get("temperature", 1.0) if settings.get("do_sample") else 0,
            top_k=settings.get("top_k", 0),
            top_p=settings.get("top_p", 1.0),
        )
        until = settings.get("until") or []
        stops = [*([until] if isinstance(until, str) else until), self.text.separator]
        new_texts = [
            self.text.decode(text[len(prompt) :].tolist()) for text, prompt in zip(texts, prompts, strict=True)
        ]
        return [postprocess_generated_text(text, stops, None) for text in new_texts]
