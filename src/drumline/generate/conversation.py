"""A conversation with one model, in turns."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.chats import ChatTemplate
from drumline.generate.engine import Reason, Request, Scored, make_engine
from drumline.generate.inference import WritingRun
from drumline.generate.sample import SampleConfig
from drumline.generate.stops import StoppingText


class Conversation:
    """system: a message that comes before all others."""

    def __init__(self, run: WritingRun, settings: SampleConfig, *, system: str = "") -> None:
        self._run, self._settings = run, settings
        self._template = ChatTemplate(run.tokenizer, run.folder.path)
        self._engine = make_engine(
            run.model, slots=1, context=run.context, ends=self._template.ends, vocabulary=run.tokenizer.vocab_size
        )
        self._first = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        """Forget what was said."""
        self._messages = [*self._first]

    def answer(self, message: str) -> Iterator[str]:
        """The answer, piece by piece. An interrupt ends it where it is."""
        self._messages.append({"role": "user", "content": message})
        reader = _Pieces(StoppingText(self._run.tokenizer, self._template.stops))
        prompt = self._template.fitting(self._messages, context=self._run.context)
        settings = self._settings
        request = Request(prompt=prompt, settings=settings, max_tokens=settings.max_tokens, reader=reader)
        self._engine.submit(request)
        text = ""
        while not reader.has_ended:
            try:
                self._engine.step()
            except KeyboardInterrupt:
                request.cancelled = True
            for piece in reader.take():
                shown = piece if text else piece.lstrip()  # after "Assistant:" comes a space
                text += shown
                yield shown
        self._messages.append({"role": "assistant", "content": text.strip()})


class _Pieces:
    """Reads the tokens of an answer, and keeps its text until it is taken."""

    def __init__(self, writing: StoppingText) -> None:
        self._writing = writing
        self._pieces: list[str] = []
        self.has_ended = False

    def prompt_scored(self, tokens: list[Scored]) -> None:
        """Not asked for."""

    def token(self, token: Scored) -> bool:
        self._pieces.append(self._writing.push(token.token))
        return not self._writing.stopped

    def ended(self, reason: Reason, token: Scored | None) -> None:
        self._pieces.append(self._writing.flush())
        self.has_ended = True

    def take(self) -> list[str]:
        pieces, self._pieces = self._pieces, []
        return [piece for piece in pieces if piece]
