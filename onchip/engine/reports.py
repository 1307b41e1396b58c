"""What the users of an engine are told, and when: texts, and outputs of their requests."""

from collections.abc import Callable, Iterable, Sequence

from onchip.engine.request import Request, RequestOutput, Sample, Status
from onchip.engine.text import Reader, text_of
from onchip.engine.tokenizer import Tokenizer

Stop = Callable[[Sample, str], None]  # a sample ends because of this text


class Reports:
    """Knows who streams, and whose text may end it: these are read in every step, the others once,
    at their end. tokenizer: None, and there are no texts.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Stop):
        self._tokenizer, self._stop = tokenizer, stop
        self._streamed: set[Request] = set()
        self._watched: set[Request] = set()

    def __len__(self) -> int:
        """Requests that are read in every step."""
        return len(self._watched)

    def watch(self, request: Request, stream: bool) -> None:
        """A new request. Of which samples are chosen in the end nothing can be shown before."""
        if stream and not request.chosen_last:
            self._streamed.add(request)
        if request in self._streamed or request.params.stop:
            self._watched.add(request)

    def forget(self, request: Request) -> None:
        self._streamed.discard(request)
        self._watched.discard(request)

    def clear(self) -> None:
        self._streamed.clear()
        self._watched.clear()

    def drawn(self, samples: Iterable[Sample], finished: Iterable[Request]) -> list[RequestOutput]:
        """These samples have grown, and these requests are finished by it; texts may end more."""
        grown = {one.request: None for one in samples} if self._watched else {}
        told = dict.fromkeys(finished)
        for request in [request for request in grown if request in self._watched]:
            self._read(request)
            if request.finished or request in self._streamed:
                told[request] = None
        return self.tell(told)

    def tell(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Their outputs; complete, of those that are finished."""
        requests = list(requests)
        for request in requests:
            if request.finished:
                self.forget(request)
            if self._tokenizer is not None:
                self._put_into_words(request, self._tokenizer)
        return [request.output() for request in requests]

    def _read(self, request: Request) -> None:
        """The texts of the samples that grow."""
        unread = [s for s in request.samples if not s.complete]
        for sample in unread if self._tokenizer is not None else ():
            try:
                stop = _grow(sample, self._tokenizer)
            except ValueError as error:
                self._stop(sample, str(error))  # its pages are free
                _fail(sample, error)
                continue
            if stop is not None:
                if sample.finished:  # by its length, with the same token
                    sample.finish(Status.FINISHED_STOPPED, stop)
                self._stop(sample, stop)

    def _put_into_words(self, request: Request, tokenizer: Tokenizer) -> None:
        for sample in request.samples:
            if sample.finished and not sample.complete:
                try:
                    _complete(sample, tokenizer)
                except ValueError as error:
                    _fail(sample, error)
            _name_tokens(sample.logprobs, tokenizer)
        _name_tokens(request.prompt_logprobs or (), tokenizer)


def _grow(sample: Sample, tokenizer: Tokenizer) -> str | None:
    """The text of its new tokens; the stop text that they complete."""
    request = sample.request
    if sample.reader is None:
        params = request.params
        sample.reader = Reader(
            tokenizer, request.prompt_token_ids, params.stop, params.skip_special_tokens
        )
        sample.text = sample.reader.text
    new = sample.token_ids[sample.reader.num_tokens :]
    if not new:
        return None
    return sample.reader.push(new, len(sample.token_ids) >= request.params.min_tokens)


def _complete(sample: Sample, tokenizer: Tokenizer) -> None:
    """The whole text of a sample, with what was held back; or what comes before its stop text."""
    if sample.reader is None:
        request = sample.request
        skip = request.params.skip_special_tokens
        sample.text.add(text_of(tokenizer, request.prompt_token_ids, sample.token_ids, skip))
    elif not isinstance(sample.stop_reason, str):
        sample.reader.finish()
    sample.reader, sample.complete = None, True


def _fail(sample: Sample, error: ValueError) -> None:
    """A tokenizer that cannot decode fails this sample, not the engine."""
    sample.finish(Status.FINISHED_ERROR, str(error))
    sample.reader, sample.complete = None, True


def _name_tokens(tables: Sequence, tokenizer: Tokenizer) -> None:
    """Logprobs that were not shown yet, the last ones, say which texts they are about."""
    for table in reversed(tables):
        if table is None or next(iter(table.values())).decoded_token is not None:
            return
        for token, logprob in table.items():
            table[token] = logprob._replace(decoded_token=_name_token(token, tokenizer))


def _name_token(token: int, tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.decode([token])
    except ValueError:
        return "\ufffd"
