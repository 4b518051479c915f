"""Checkpoints of a run -> a store, by a thread of rank 0, while training goes on.

What is on disk, complete and verified, is uploaded: data first, the manifest last. Meanwhile hard links keep it from
being deleted. If newer ones are saved in the meantime, only the newest is taken next. If the store fails, this is told
once and tried again; training never waits, but the end of a run does.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.checkpoint import Retention, checkpoint_paths, is_part
from drumline.errors import CheckpointError, ConfigError, DataError, DrumlineError
from drumline.files import RunFolder, now, stored_config
from drumline.parallel import own_pulse
from drumline.plugins import remember
from drumline.signals import raising
from drumline.stores.keeping import Judge
from drumline.stores.of_run import DAMAGED, MANIFEST, RUN, WRITER, RunStore, check_writable, is_run_file, json_of

if TYPE_CHECKING:
    from drumline.train import Loop

Tell = Callable[[str, dict[str, Any]], None]
_PATIENCE_S = 5.0
"""How long a single request is tried again, before the whole upload is."""
_PAUSES_S = (1.0, 60.0)
"""The first pause after a failed upload, and the longest; each is twice the previous one."""
_SOON_S, _LAST_S = 2.0, 600.0
"""The end of a run waits that long without a word, and that long for a store that fails."""
_ASIDE = ".upload-"


class Uploader:
    """Of rank 0. `offer` returns at once; `finish` waits."""

    pauses_s, last_s = _PAUSES_S, _LAST_S

    def __init__(
        self,
        run: RunStore,
        folder: RunFolder,
        *,
        retention: Retention,
        tell: Tell,
        goes_back: bool = False,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        """
        tell:      (message, event) for the user and events.jsonl
        goes_back: the run resumes from a step that was chosen: newer checkpoints in the store are not of its course
        reached:   called at each named point of an upload, for tests that kill the process there
        """
        self._run, self._folder, self._tell, self._reached = run, folder, tell, reached
        self._judge, self._goes_back = Judge(run, retention), goes_back
        self._changed = threading.Condition()
        self._next: int | None = None
        self._busy: int | None = None
        self._skipped = self._failures = 0
        self._closing = self._ends = self._refused = self._claimed = False
        self._why = ""
        self._progressed = time.monotonic()
        self._token = uuid.uuid4().hex
        self._sent: dict[str, tuple[int, int]] = {}
        self.uploaded_step: int | None = None
        """The newest step that this process has uploaded, or found there."""
        for leftover in folder.checkpoints.glob(f"{_ASIDE}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)
        self._thread.start()

    def claim(self) -> None:
        """Make the place in the store this run's and this process's; an error if it is another's, or fails."""
        self._run.claim(self._folder.run_id())
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": now(), "token": self._token}
        self._run.store.put(WRITER, json.dumps(about).encode())
        self._claimed = True

    def offer(self, step: int) -> None:
        """A checkpoint that is complete on disk."""
        with self._changed:
            if step in (self._next, self._busy, self.uploaded_step) or self._refused:
                return
            if self._next is not None:
                self._skipped += 1
            self._next = step
            self._changed.notify_all()

    def wait(self, within_s: float) -> bool:
        """Whether nothing is left to upload, after waiting so long at most."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, within_s)

    def missing(self) -> tuple[int, str] | None:
        """A step that is not in the store, and why; None if all is there."""
        with self._changed:
            step = self._next if self._next is not None else self._busy
            return None if step is None else (step, self._why or "it is still being uploaded")

    def finish(self, say: Callable[[str], None]) -> None:
        """Wait for the last upload; CheckpointError if it fails for long, or a signal interrupts that."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        try:
            # A supervised rank that was asked to stop may get the signal twice; its supervisor ends it in time.
            with nullcontext() if own_pulse().is_supervised else raising():
                if not self.wait(_SOON_S):
                    step = (self.missing() or (0, ""))[0]
                    say(f"waiting for the upload of step {step:,} to {self._run.url}; press Ctrl-C to give it up")
                self._progressed = time.monotonic()
                while not self.wait(0.1):
                    own_pulse().still_there()
                    if time.monotonic() - self._progressed > self.last_s:
                        break
        except KeyboardInterrupt:
            pass
        if (left := self.missing()) is not None:
            raise CheckpointError(
                f"the checkpoint of step {left[0]:,} is not in {self._run.url}: {left[1]}",
                fix=f"it is in {self._folder.path}; run the same command again to upload it",
            )

    def close(self) -> None:
        """Stop after what is being uploaded; does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        return (self._next is None and self._busy is None and not self._ends) or self._refused

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._ends or self._closing)
                if self._closing:
                    return
                self._busy, self._next = self._next, None
                skipped, self._skipped = self._skipped, 0
            if self._busy is None:
                self._end()
            elif skipped:
                what = f"{skipped} checkpoint{'s' if skipped > 1 else ''}"
                self._tell(
                    f"{what} could not be uploaded before newer ones were saved: the newest is taken, step "
                    f"{self._busy:,}; use a larger --save_every to upload all",
                    {"event": "uploads skipped", "count": skipped, "step": self._busy},
                )
            self._until_uploaded()

    def _until_uploaded(self) -> None:
        """Upload what is in `_busy`, or what is newer by then, however often the store fails."""
        while self._busy is not None:
            step = self._busy
            try:
                self._upload(step)
            except ConfigError as error:  # another run's, or another process has taken over
                with self._changed:
                    self._refused, self._why, self._next = True, error.problem, None
                    self._changed.notify_all()
                self._tell(f"WARNING: {error.problem}; nothing is uploaded any more", {"event": "uploads refused"})
                return
            except FileNotFoundError:  # deleted before its turn: there is a newer one
                self._done(step)
            except (DataError, OSError) as error:
                self._failed(step, error)
            else:
                self._done(step)

    def _end(self) -> None:
        """The last lines of metrics.jsonl; a checkpoint has all that a run needs to go on."""
        with suppress(DataError, OSError):
            if self.uploaded_step is not None:
                self._send_run_files()
        with self._changed:
            self._ends = False
            self._changed.notify_all()

    def _done(self, step: int) -> None:
        with self._changed:
            self._busy, self._why, self._failures = None, "", 0
            self._progressed = time.monotonic()
            self._changed.notify_all()

    def _failed(self, step: int, error: Exception) -> None:
        why = error.problem if isinstance(error, DrumlineError) else str(error)
        pause_s = min(self.pauses_s[1], self.pauses_s[0] * 2 ** min(self._failures, 10))
        self._failures += 1
        if self._failures == 1:
            self._tell(
                f"WARNING: step {step:,} could not be uploaded: {why}. It is on disk, training continues, and the "
                "upload is tried again",
                {"event": "upload failed", "step": step, "why": why},
            )
        with self._changed:
            self._why = why
            self._changed.wait_for(lambda: self._closing, pause_s)
            if self._next is not None:  # the newest is worth more than the one that failed
                self._busy, self._next = self._next, None
            if self._closing:
                self._busy = None

    def _upload(self, step: int) -> None:
        began, failed = time.monotonic(), self._failures
        if not self._claimed:
            self.claim()
        writer = json_of(self._run.text(WRITER))
        if writer.get("token") != self._token:
            raise ConfigError(
                f"{self._run.url} is written by another process: {writer.get('pid')} on {writer.get('host')}, since "
                f"{writer.get('since')}",
                fix="stop one of them",
            )
        there = self._run.checkpoints()
        with self._linked(step) as files:
            sizes = {path.name: path.stat().st_size for path in files}
            same = there.get(step) == sizes and self._is_same(step, files)
            if not same:
                self._send(step, files, sizes, there.get(step, {}))
        self._judge.forget(step)
        size_bytes = 0 if same else sum(sizes.values())
        self._tidy(step)
        self._reached("tidied")
        self.uploaded_step, seconds = step, round(time.monotonic() - began, 3)
        if same:
            return
        back = f"step {step:,} is uploaded to {self._run.url}, which works again" if failed else ""
        self._tell(back, {"event": "uploaded", "step": step, "bytes": size_bytes, "seconds": seconds})

    @contextmanager
    def _linked(self, step: int) -> Iterator[list[Path]]:
        """The files of a checkpoint, which stay even if it is deleted meanwhile."""
        source, aside = self._folder.checkpoint(step), self._folder.checkpoints / f"{_ASIDE}{self._token[:12]}"
        files = [path for path in sorted(source.iterdir()) if is_part(path.name) or path.name == MANIFEST]
        try:
            aside.mkdir()
            for path in files:
                os.link(path, aside / path.name)
        except FileNotFoundError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        except OSError:  # a disk without links: if it is deleted meanwhile, the next one is uploaded
            shutil.rmtree(aside, ignore_errors=True)
            yield files
            return
        try:
            yield [aside / path.name for path in files]
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _is_same(self, step: int, files: list[Path]) -> bool:
        """Whether the store has this very checkpoint: of the same step there may be one of another course."""
        (manifest,) = (path for path in files if path.name == MANIFEST)
        return self._run.store.get(self._run.name(step, MANIFEST)) == manifest.read_bytes()

    def _send(self, step: int, files: list[Path], sizes: dict[str, int], there: dict[str, int]) -> None:
        store, run = self._run.store, self._run
        if there:  # an upload that was interrupted, or the same step of another course
            run.delete(step, list(there))
        self._send_run_files()
        for path in sorted(files, key=lambda path: (path.name == MANIFEST, path.name == RUN, path.name)):
            if path.name == MANIFEST:
                found = {**run.checkpoints().get(step, {}), MANIFEST: sizes[MANIFEST]}
                if found != sizes:
                    raise DataError(f"{run.place(step)} does not have what was uploaded", fix="look at the store")
                self._reached("before the manifest")
            store.put(run.name(step, path.name), path)
            self._progressed = time.monotonic()
            self._reached(path.name)

    def _send_run_files(self) -> None:
        """What a new machine needs besides a checkpoint; only what has changed."""
        root = self._folder.path
        for path in sorted((*root.glob("*"), *self._folder.pretrained.glob("*"))):
            name = path.relative_to(root).as_posix()
            if not is_run_file(name) or path.is_symlink() or not path.is_file():
                continue
            state = (path.stat().st_mtime_ns, path.stat().st_size)
            if self._sent.get(name) != state:
                aside = self._folder.checkpoints / f"{_ASIDE}{self._token[:12]}-{path.name}"
                try:
                    shutil.copyfile(path, aside)  # one that grows while it is read would be torn
                    self._run.store.put(name, aside)
                finally:
                    with suppress(OSError):
                        aside.unlink()
                self._sent[name] = state
                self._reached(name)

    def _tidy(self, step: int) -> None:
        """Remove from the store what need not be kept, and what is not complete."""
        there = self._run.checkpoints()
        whole = {each: files for each, files in there.items() if DAMAGED not in files}
        gone = {each: files for each, files in whole.items() if MANIFEST not in files and each != step}
        if self._goes_back or step < (self.uploaded_step or 0):
            gone |= {each: files for each, files in there.items() if each > step}
            self._goes_back = False
        steps = [each for each in whole if each not in gone]
        kept = self._judge.reasons(steps)
        gone |= {each: there[each] for each in steps if not kept[each] and each != step}
        for each, files in gone.items():
            self._run.delete(each, list(files))
            self._reached("deleted")


@contextmanager
def uploads_of_run(url: str, loop: Loop) -> Iterator[None]:
    """Inside, each checkpoint that the loop saves is uploaded; the end waits for the last one."""
    check_writable(url)
    remember(url, None)
    folder, history = loop.setup.folder, loop.history
    goes_back = loop.setup.resume_from != "auto"
    uploader = Uploader(
        RunStore(url, patience_s=_PATIENCE_S),
        folder,
        retention=loop.setup.retention,
        tell=history.tell,
        goes_back=goes_back,
    )
    try:
        try:
            uploader.claim()
        except DataError as error:
            if not is_known(url, folder):
                raise
            what = {"event": "upload failed", "why": error.problem}
            history.tell(f"WARNING: {error.problem}; training continues, and uploads are tried again", what)
        loop.saver.then = uploader.offer
        try:
            yield
        except DrumlineError:  # the run failed; what it has saved is worth as much as ever
            with suppress(CheckpointError):
                uploader.finish(loop.records.say)
            raise
        if loop.saver.saved_step is not None:
            uploader.offer(loop.saver.saved_step)
        loop.records.flush()
        uploader.finish(loop.records.say)
    finally:
        uploader.close()


def is_known(url: str, folder: RunFolder) -> bool:
    """Whether a run on disk has used this store before, so that it goes on while the store fails."""
    stored = stored_config(folder)
    return stored is not None and stored.run.checkpoint_store == url and bool(checkpoint_paths(folder.checkpoints))
