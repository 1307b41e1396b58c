"""Outputs for the users of an engine: detokenized texts, stop strings, logprobs."""

from collections.abc import Callable, Iterable, Sequence

from onchip.engine.detokenizer import Detokenizer, decode_text
from onchip.engine.request import Request, RequestOutput, Sample, Status
from onchip.engine.tokenizer import Tokenizer

Stop = Callable[[Sample, str], None]  # ends a sample because of this stop string


class OutputProcessor:
    """Requests that stream or have stop strings are detokenized in every step, all others once,
    when they end. tokenizer: None for no texts.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Stop):
        self._tokenizer, self._stop = tokenizer, stop
        self._streamed: set[Request] = set()
        self._watched: set[Request] = set()

    def __len__(self) -> int:
        """Requests that are detokenized in every step."""
        return len(self._watched)

    def add_request(self, request: Request, stream: bool) -> None:
        """Register a new request. Samples that are ranked at the end are not streamed."""
        if stream and not request.is_ranked_at_end:
            self._streamed.add(request)
        if request in self._streamed or request.params.stop:
            self._watched.add(request)

    def drop_request(self, request: Request) -> None:
        self._streamed.discard(request)
        self._watched.discard(request)

    def clear(self) -> None:
        self._streamed.clear()
        self._watched.clear()

    def process_sampled(
        self, samples: Iterable[Sample], finished: Iterable[Request]
    ) -> list[RequestOutput]:
        """Detokenize new tokens. finished: requests that these tokens finished; stop strings may
        finish more.
        """
        grown = {sample.request: None for sample in samples} if self._watched else {}
        reported = dict.fromkeys(finished)
        for request in [request for request in grown if request in self._watched]:
            self._detokenize(request)
            if request.finished or request in self._streamed:
                reported[request] = None
        return self.make_outputs(reported)

    def make_outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Outputs of these requests, with complete texts for finished ones."""
        requests = list(requests)
        for request in requests:
            if request.finished:
                self.drop_request(request)
            if self._tokenizer is not None:
                self._decode_finished(request, self._tokenizer)
        return [request.output() for request in requests]

    def _detokenize(self, request: Request) -> None:
        """Extend the texts that are not complete, and stop samples at stop strings."""
        unread = [s for s in request.samples if not s.has_full_text]
        for sample in unread if self._tokenizer is not None else ():
            try:
                stop = _push_new_tokens(sample, self._tokenizer)
            except ValueError as error:
                self._stop(sample, str(error))  # frees its pages
                _fail(sample, error)
                continue
            if stop is not None:
                if sample.finished:  # the same token reached the maximum length
                    sample.finish(Status.FINISHED_STOPPED, stop)
                self._stop(sample, stop)

    def _decode_finished(self, request: Request, tokenizer: Tokenizer) -> None:
        for sample in request.samples:
            if sample.finished and not sample.has_full_text:
                try:
                    _finish_text(sample, tokenizer)
                except ValueError as error:
                    _fail(sample, error)
            _decode_logprobs(sample.logprobs, tokenizer)
        _decode_logprobs(request.prompt_logprobs or (), tokenizer)


def _push_new_tokens(sample: Sample, tokenizer: Tokenizer) -> str | None:
    """Detokenize the new tokens up to the first that completes a stop string, which is returned."""
    request = sample.request
    if sample.detokenizer is None:
        params = request.params
        sample.detokenizer = Detokenizer(
            tokenizer, request.prompt_token_ids, params.stop, params.skip_special_tokens
        )
        sample.text = sample.detokenizer.text
    detokenizer = sample.detokenizer
    for token in sample.token_ids[detokenizer.num_tokens :]:
        num_tokens = detokenizer.num_tokens + 1
        stop = detokenizer.push([token], num_tokens >= request.params.min_tokens)
        if stop is not None:
            sample.drop_after(num_tokens)  # drafts that were accepted with this token
            return stop
    return None


def _finish_text(sample: Sample, tokenizer: Tokenizer) -> None:
    """Complete the text of a sample, including characters held back; a stop string and all text
    after it are left out.
    """
    if sample.detokenizer is None:
        request = sample.request
        skip = request.params.skip_special_tokens
        sample.text.add(decode_text(tokenizer, request.prompt_token_ids, sample.token_ids, skip))
    elif not isinstance(sample.stop_reason, str):
        sample.detokenizer.finish()
    sample.detokenizer, sample.has_full_text = None, True


def _fail(sample: Sample, error: ValueError) -> None:
    """A tokenizer that cannot decode fails this sample, not the engine."""
    sample.finish(Status.FINISHED_ERROR, str(error))
    sample.detokenizer, sample.has_full_text = None, True


def _decode_logprobs(tables: Sequence, tokenizer: Tokenizer) -> None:
    """Add the token texts to the newest logprobs, which have none yet."""
    for table in reversed(tables):
        if table is None or next(iter(table.values())).decoded_token is not None:
            return
        for token, logprob in table.items():
            table[token] = logprob._replace(decoded_token=_decode_token(token, tokenizer))


def _decode_token(token: int, tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.decode([token])
    except ValueError:
        return "\ufffd"
