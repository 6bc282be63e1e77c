"""`fit(run)`: the training loop. It knows steps, schedules, evaluation and stopping, but no strategy.

All ranks run this same function; only rank 0 prints and writes.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from aiscale import checkpoint, cost
from aiscale.config import ConfigError, HFModelConfig, Run
from aiscale.data import Batches, Corpus, Tokenizer, open_corpus, train_tokenizer
from aiscale.data.pretrained import check_pretrained
from aiscale.distributed import World, connect, lost_another_rank, watching
from aiscale.meter import Meter, held_bytes, peak_memory_bytes
from aiscale.model.build import count_parameters, weight_files
from aiscale.optim import lr_at
from aiscale.parallel import StepResult, build
from aiscale.train.records import Records
from aiscale.train.saving import newest_good


class AlreadyTrained(ConfigError):
    """All steps have been taken."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line."""


@dataclass
class Result:
    """The results of a run, the same on every rank."""

    path: Path  #: runs/NAME
    losses: list[float] = field(default_factory=list)  #: training loss of every step taken here, nats a token
    val_losses: list[tuple[int, float]] = field(default_factory=list)  #: (steps taken, validation loss)
    summary: dict = field(default_factory=dict)
    stopped: bool = False  #: ended early, by Ctrl-C or a signal; resume=True continues


def fit(
    run: Run,
    world: World | None = None,
    *,
    runs_dir: str | Path = "runs",
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    note_saved: str | Path | None = None,
    first: Callable[[World], None] | None = None,
) -> Result:
    """Train `run` on the ranks of `world` (default: those that `connect` finds); results go to runs_dir/NAME.

    `resume` continues exactly from its newest checkpoint. `note_saved`: a file that gets the path of each completed
    checkpoint. `first` is called on every rank when all have connected. Raises CheckpointError, ConfigError,
    ConnectError, RunFolderError or TrainingError with one line.
    """
    own_world = world is None
    # The watchdog must time out before the backend: it knows which rank is missing.
    timeout_s = max(300.0, run.loop.hang_timeout_s + 60)
    world = world or connect(run.loop.device, timeout_s, backend=run.loop.backend)
    try:
        if first:
            first(world)
        with world.link.at(run.loop.link_mbit_s or world.link.rate_mbit_s):
            training = _Training(run, world, Path(runs_dir) / run.name, progress, note_saved)
            with (
                watching(world, run.loop.hang_timeout_s, tell=training.note_hang),
                _setting(training.stop, signal.SIGUSR1),  # from a scheduler, perhaps before the first step
            ):
                return training.execute(resume, overwrite)
    except Exception as error:
        error.gone = world.gone() if lost_another_rank(error) else []
        error.failed_alike = world.failed_alike(error)
        raise
    finally:
        if own_world:
            world.close()


class _Training:
    def __init__(self, run: Run, world: World, path: Path, progress: bool, note_saved: str | Path | None) -> None:
        self.run, self.world, self.path, self.progress, self.note_saved = run, world, path, progress, note_saved
        self.stop = threading.Event()
        self.n_micro, _ = run.loop.micro_batches(run.parallel.data_parallel(world.size))
        self.records: Records | None = None  # on rank 0 only

    def execute(self, resume: bool, overwrite: bool) -> Result:
        """Check and build everything before an earlier run's files are touched, then train."""
        run, world, loop = self.run, self.world, self.run.loop
        self.corpus = corpus = load_corpus(run, world)
        self.batches = Batches(corpus.train, seq_len=loop.seq_len, global_batch=loop.global_batch, seed=run.data.seed)
        self.val_batches = Batches(corpus.val, seq_len=loop.seq_len, global_batch=loop.global_batch, seed=None)
        self.total_steps = round(loop.epochs * self.batches.steps_per_epoch) if loop.epochs else loop.steps
        # Only rank 0 has the files: it checks, and its error is raised on all ranks.
        options = {"sha256": corpus.sha256, "resume": resume, "overwrite": overwrite}
        world.from_rank0(lambda: Records.check(self.path, run, **options))
        self.engine = build(run, world)
        try:
            checkpoint.check_shared(self.path, world)
            world.from_rank0(lambda: self._claim_folder(overwrite))
            self.first_step = self._resume() if resume else 0
            flops = cost.flops_per_token(run.model, loop.seq_len)
            self.meter = Meter(world, flops_per_token=flops, precision=loop.precision)
            self._describe()
            try:
                return self._train()
            except BaseException as error:
                self.note_failure(f"{type(error).__name__}: {error}")
                raise
        finally:
            self.engine.close()
            if self.records:
                self.records.close()

    def _train(self) -> Result:
        run, world, engine, loop = self.run, self.world, self.engine, self.run.loop
        result, last_finite, started = Result(path=self.path), None, time.perf_counter()
        saved_s = time.monotonic()
        with _setting(self.stop, signal.SIGINT, signal.SIGTERM), self._bar() as bar:
            for step in range(self.first_step, self.total_steps):
                world.traffic.progress.step = step + 1
                micro_batches = self.batches.share(step, engine.data_rank, engine.data_world, self.n_micro)
                lr = lr_at(step, self.total_steps, run.optimizer)
                with self.meter.step():
                    outcome = engine.step(micro_batches, lr)
                measures = {"lr": lr, **self.meter.record(outcome.tokens)}
                self._check_finite(outcome, step, last_finite)
                last_finite = (step, outcome.loss)
                result.losses.append(outcome.loss)
                done = step + 1
                self._log(done, outcome, measures)
                bar.set_postfix_str(f"loss {outcome.loss:.3f}, {measures['tokens_per_s']:,.0f} tokens/s", refresh=False)
                bar.update()
                if loop.eval_every and done % loop.eval_every == 0 and done < self.total_steps:
                    self._evaluate(done, result)
                if world.any(self.stop.is_set()):  # ranks see a signal at different steps
                    result.stopped = done < self.total_steps
                    break
                due = bool(loop.checkpoint_every) and done % loop.checkpoint_every == 0
                if loop.checkpoint_minutes and not due:  # the same on all ranks: rank 0's clock counts
                    due = world.any(world.is_main and time.monotonic() - saved_s >= 60 * loop.checkpoint_minutes)
                if due and done < self.total_steps:
                    self._save(done)
                    saved_s = time.monotonic()
            done = self.first_step + len(result.losses)
            # Do not evaluate a run that was told to stop: it may be killed soon.
            if not result.stopped and not any(step == done for step, _ in result.val_losses):
                self._evaluate(done, result)
            if loop.save_last or result.stopped:
                self._save(done)
            if result.stopped and self.note_saved and world.is_main:
                with open(self.note_saved, "a") as file:
                    file.write("stopped\n")
        del bar  # a late Ctrl-C would be lost in its __del__
        self._summarize(result, done, time.perf_counter() - started)
        return result

    def _save(self, step: int) -> None:
        facts = {"step": step, "keep": self.run.loop.keep_checkpoints}
        written = checkpoint.save(self.engine, self.path / "checkpoints", **facts)
        if self.note_saved and self.world.is_main:
            Path(self.note_saved).write_text(f"{written}\n")

    def _claim_folder(self, overwrite: bool) -> None:
        self.records = Records.open(self.path, overwrite=overwrite)

    def note_failure(self, what: str) -> None:
        if self.records:
            with suppress(OSError):  # a full disk must not hide the error
                self.records.finish("failed", error=what)

    def note_hang(self, what: str) -> None:
        """note_failure, and write `hung` to `note_saved`: the job may be resumed. On any rank: 0 may be missing."""
        self.note_failure(what)
        if self.note_saved:
            with open(self.note_saved, "a") as file:
                file.write("hung\n")

    def _check_finite(self, outcome: StepResult, step: int, last: tuple[int, float] | None) -> None:
        if math.isfinite(outcome.loss) and (math.isfinite(outcome.grad_norm) or self.run.loop.precision == "fp16"):
            return
        broken = "loss" if not math.isfinite(outcome.loss) else "gradient norm"
        value = outcome.loss if broken == "loss" else outcome.grad_norm
        before = f"the last finite loss was {last[1]:.4f} at step {last[0] + 1}" if last else "it was the first step"
        raise TrainingError(
            f"the {broken} is {value} at step {step + 1}; {before}: lower optimizer.lr (now {self.run.optimizer.lr}), "
            "lengthen optimizer.warmup_steps, or use loop.precision=fp32; checkpoints are untouched"
        )

    def _log(self, step: int, outcome: StepResult, measures: dict) -> None:
        if self.records and (step % self.run.loop.log_every == 0 or step == self.total_steps):
            self.records.append(
                "train",
                step=step,
                loss=outcome.loss,
                grad_norm=outcome.grad_norm,
                skipped=outcome.skipped,
                tokens=outcome.tokens,
                **measures,
                held_bytes=held_bytes(self.engine.tensors()),
                peak_memory_bytes=peak_memory_bytes(self.world.device),
            )

    def _evaluate(self, step: int, result: Result) -> None:
        count = min(self.run.loop.eval_batches, self.val_batches.steps_per_epoch)
        engine = self.engine
        shares = (self.val_batches.share(i, engine.data_rank, engine.data_world, self.n_micro) for i in range(count))
        loss, tokens = engine.evaluate(batch for share in shares for batch in share)
        result.val_losses.append((step, loss))
        if self.records:
            self.records.append("eval", step=step, loss=loss, perplexity=math.exp(min(loss, 700)), tokens=tokens)

    def _resume(self) -> int:
        folder = newest_good(self.path / "checkpoints", self.world)
        step = checkpoint.load(self.engine, folder) if folder else 0
        if self.records:
            self.records.rewind(step)
        if step >= self.total_steps:
            steps = f"{step} of {self.total_steps} steps"
            raise AlreadyTrained(f"{self.path} has already taken {steps}: raise loop.steps to train longer")
        return step

    def _describe(self) -> None:
        if self.records:
            self.records.write("tokenizer.json", self.corpus.tokenizer.to_json())
            for name, text in getattr(self.engine, "files", dict)().items():  # such as DeepSpeed's configuration
                self.records.write(name, text)
            self.records.describe(
                self.run,
                self.world,
                corpus={"name": self.corpus.name, "sha256": self.corpus.sha256, "train_tokens": len(self.corpus.train)},
                parameters=count_parameters(self.run.model),
                peak_flops={"per_rank": self.meter.peak_flops, "source": self.meter.peak_source},
                total_steps=self.total_steps,
                resumed_from_step=self.first_step,
            )

    def _bar(self) -> tqdm:
        in_notebook = "ipykernel" in sys.modules
        out = sys.stdout if in_notebook else sys.stderr  # a notebook shows standard error on a red ground
        return tqdm(
            total=self.total_steps,
            initial=self.first_step,
            desc=self.run.name,
            unit="step",
            disable=not (self.progress and self.world.is_main),
            file=out,
            # A log keeps every redraw as a line: once in 10 s is enough.
            mininterval=0.2 if in_notebook or out.isatty() else 10,
        )

    def _summarize(self, result: Result, done: int, seconds: float) -> None:
        tokens = len(result.losses) * self.run.loop.global_batch * self.run.loop.seq_len
        val_loss = dict(result.val_losses).get(done)
        if not result.stopped:
            self.meter.measure_peak()  # again: the machine may have been busy at the start
        result.summary = {
            "steps": done,
            "tokens": tokens,
            "train_loss": result.losses[-1] if result.losses else None,
            "val_loss": val_loss,
            "val_perplexity": None if val_loss is None else math.exp(min(val_loss, 700)),
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            **self.meter.overall(),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
        }
        for report in self.world.gather(self.meter.rank_report(self.engine.tensors())):
            if self.records:
                self.records.append("rank", step=done, **report)
        if self.records:
            self.records.finish("stopped" if result.stopped else "finished", summary=result.summary)


def load_corpus(run: Run, world: World) -> Corpus:
    """The run's corpus on every rank; rank 0 trains the tokenizer."""
    text = world.from_rank0(lambda: train_tokenizer(run.data).to_json())
    tokenizer = Tokenizer.from_json(text)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"the {tokenizer.kind} tokenizer of corpus {run.data.corpus} has {tokenizer.vocab_size} tokens, more than "
            f"model.vocab_size {run.model.vocab_size}: set model.vocab_size={tokenizer.vocab_size}"
        )
    corpus = world.together(lambda: open_corpus(run.data, tokenizer=tokenizer))
    hashes = world.gather(corpus.sha256)
    if odd := [rank for rank, sha256 in enumerate(hashes) if sha256 != hashes[0]]:
        raise ConfigError(
            f"data.corpus {run.data.corpus} is not the same text on ranks 0 and {odd[0]}: give every node the same "
            "files and Python version, or a folder from aiscale data prepare"
        )
    if isinstance(run.model, HFModelConfig) and weight_files(run.model):
        folder, name = run.model.folder, run.data.corpus
        world.from_rank0(lambda: check_pretrained(folder, corpus, name))
    return corpus


@contextmanager
def _setting(stop: threading.Event, *signals: int) -> Iterator[None]:
    """These signals set `stop`, so that the loop ends after its step; a second Ctrl-C raises
    KeyboardInterrupt. A scheduler's second signal does not: the checkpoint is being written by then.
    Signals that were blocked until now come at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return

    def request(number: int, frame) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, request) for number in signals}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
