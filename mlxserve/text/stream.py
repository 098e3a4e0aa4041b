"""One request's text: tokens in, readable pieces out, until a stop string.

Knows: how a detokenizer and a stop matcher fit together. Knows nothing of sampling or of end-of-turn ids,
which the engine acts on; such an id shows no text here.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.text.detokenize import Detokenizer
from mlxserve.text.stop import StopMatcher
from mlxserve.text.tokenizer import Tokenizer


class TextStream:
    """The text of one generation. Not thread-safe; never raises.

        stream = TextStream(tokenizer, stops=["\\n\\n"])
        for token in tokens:
            show(stream.push(token))
            if stream.stopped:
                break
        show(stream.finish())

    `continues` as in `Tokenizer.detokenizer`. Ids of `Tokenizer.hidden_in_replies` show no text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, continues: bool = False) -> None:
        self._pieces: Detokenizer = tokenizer.detokenizer(
            hidden=tokenizer.hidden_in_replies, continues=continues
        )
        self._stops = StopMatcher(stops)
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; further tokens give no text."""
        return self.stop is not None

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often none."""
        if self.stop is not None:
            return ""
        text, self.stop = self._stops.feed(self._pieces.add(token_id))
        return text

    def finish(self) -> str:
        """What was still held back: a beginning of a stop string, bytes of an unfinished character."""
        if self.stop is not None:
            return ""
        text, self.stop = self._stops.feed(self._pieces.finish(), final=True)
        return text
