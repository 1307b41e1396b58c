"""An engine on a real decoder: however requests are batched, cached, chunked, preempted or
overlapped, each gives the same outputs (I8), and nothing leaks (I5).
"""

import gc
import itertools
import threading
import weakref

import pytest
import torch

from onchip.engine import (
    BeamSearchParams,
    ByteTokenizer,
    EngineError,
    ExecutionConfig,
    Limits,
    RejectedRequest,
    SamplingParams,
    Status,
)


@pytest.fixture(scope="module")
def expected(tiny):
    """Outputs of an engine with enough pages, without prefix caching and overlap."""
    with tiny.engine(prefix_caching=False, overlap=False, budget=500, num_pages=900) as one:
        tiny.ask(one)
        return tiny.visible(tiny.drain(one)[0])


def greedy(tiny, prompt, count):
    """Greedy tokens from whole sequences, without a cache."""
    decoder, tokens = tiny.model(), list(prompt.encode())
    while count:
        logits = decoder.logits(decoder.full(torch.tensor([tokens]))[0, -1])
        tokens.append(int(logits.argmax()))
        count -= 1
    return tuple(tokens[len(prompt) :])


@torch.no_grad()
def test_greedy_tokens_equal_those_of_the_model(tiny):
    prompts = ["a", "some text", tiny.PREFIX]
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)]
    with tiny.engine() as one:
        tiny.ask(one, prompts, params)
        outputs, _ = tiny.drain(one)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.outputs[0].token_ids == greedy(tiny, prompt, 12)


@torch.no_grad()
def test_beams_are_the_search_over_whole_sequences(tiny):
    decoder, width, prompt = tiny.model(), 3, list(b"beams")
    alive = [((), 0.0)]
    for _ in range(6):
        branches = []
        for tokens, total in alive:
            hidden = decoder.full(torch.tensor([prompt + list(tokens)]))[0, -1]
            for p, token in zip(
                *decoder.logits(hidden).log_softmax(-1).topk(2 * width), strict=True
            ):
                branches.append(((*tokens, int(token)), total + float(p)))
        alive = sorted(branches, key=lambda b: -b[1])[:width]
    with tiny.engine() as one:
        one.add("beams", BeamSearchParams(width, 6, ignore_eos=True))
        outputs, _ = tiny.drain(one)
    got = [(c.token_ids, c.cumulative_logprob) for c in outputs["request-0"].outputs]
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in alive]
    assert [p for _, p in got] == pytest.approx([p for _, p in alive], abs=1e-4)


WAYS = {
    "plain": {},
    "no_prefixes": {"prefix_caching": False},
    "pages_of_1": {"page_size": 1, "num_pages": 900},
    "pages_of_64": {"page_size": 64, "num_pages": 60},
    "chunks_of_13": {"budget": 13},
    "few_pages": {"num_pages": 40},
    "few_pages_and_a_host": {"num_pages": 40, "host_pages": 200},
    "few_pages_and_small_chunks": {"num_pages": 36, "host_pages": 90, "budget": 12},
}


@pytest.mark.parametrize("overlap", [False, True], ids=["strict", "overlap"])
@pytest.mark.parametrize("way", WAYS)
def test_every_setting_gives_the_same_outputs(tiny, expected, way, overlap):
    with tiny.engine(overlap=overlap, **WAYS[way]) as one:
        if one.tier:
            one.costs.link_bytes_per_s = 1e30
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == expected
        stats = one.stats()
        assert bool(stats.preempted_by_swap) == ("host_pages" in WAYS[way])
        assert bool(stats.preempted_by_recompute) == (way == "few_pages")
        assert bool(stats.tokens_cached) == (way != "no_prefixes")


KV8_WAYS = ("plain", "chunks_of_13", "few_pages", "few_pages_and_small_chunks")


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_every_setting_gives_the_same_outputs_with_8_bit_pages(tiny, expected, kv_dtype):
    """Forks, beams, prefixes, copies and swaps keep the scales."""
    rich = {"prefix_caching": False, "overlap": False, "budget": 500, "num_pages": 900}
    with tiny.engine(**rich, kv_dtype=kv_dtype) as one:
        tiny.ask(one)
        own = tiny.visible(tiny.drain(one)[0])
    assert own != expected, "8 bits that change nothing are no 8 bits"
    for way in KV8_WAYS:
        with tiny.engine(**WAYS[way], kv_dtype=kv_dtype) as one:
            if one.tier:
                one.costs.link_bytes_per_s = 1e30
            tiny.ask(one)
            assert tiny.visible(tiny.drain(one)[0]) == own, way
            assert bool(one.stats().preempted_by_swap) == ("host_pages" in WAYS[way])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_gpu_replays_swaps_and_shares_8_bit_pages(tiny, kv_dtype):
    """The texts are the same with and without graphs, and with and without enough pages."""
    ways = [{"graphs": False}, {}, {"num_pages": 40, "host_pages": 200}]
    texts = []
    for way in ways:
        with tiny.engine("cuda", **way, kv_dtype=kv_dtype) as one:
            one.warm_up()
            tiny.ask(one)
            texts.append([[c[1:3] for c in output] for output in tiny.visible(tiny.drain(one)[0])])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("overlap", [False, True], ids=["strict", "overlap"])
@pytest.mark.parametrize("host_pages", [0, 300], ids=["recompute", "swap"])
def test_preemption_at_any_step_changes_no_output(tiny, expected, host_pages, overlap):
    """All running requests are preempted, at a different step each time."""
    for when in (1, 2, 3, 5, 8, 13):
        with tiny.engine(overlap=overlap, host_pages=host_pages) as one:
            if host_pages:
                one.costs.link_bytes_per_s = 1e30
            tiny.ask(one)
            outputs = [output for _ in range(when) for output in one.step()]
            for request in one.scheduler.running:
                one.scheduler.preempt(request)
            outputs += tiny.drain(one)[1]
            stats = one.stats()
            assert bool(host_pages) == (stats.preempted_by_swap > 0)
        last = {output.request_id: output for output in outputs}
        assert tiny.visible(last) == expected, when


LAST_STEPS = {12: 24, 40: 18, 500: 17}  # budget: the last step after which a request runs


@pytest.mark.slow
@pytest.mark.parametrize("host_pages", [0, 300])
@pytest.mark.parametrize(
    ("budget", "when"), [(n, i) for n, last in LAST_STEPS.items() for i in range(1, last + 1)]
)
def test_preemption_at_every_step_with_every_budget(tiny, expected, when, host_pages, budget):
    with tiny.engine(overlap=True, host_pages=host_pages, budget=budget) as one:
        tiny.ask(one)
        outputs = [output for _ in range(when) for output in one.step()]
        assert one.scheduler.running
        for request in one.scheduler.running:
            one.scheduler.preempt(request)
        outputs += tiny.drain(one)[1]
    last = {output.request_id: output for output in outputs}
    assert tiny.visible(last) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "last"), LAST_STEPS.items())
def test_no_request_runs_after_the_last_step(tiny, budget, last):
    """Otherwise the test above would leave out a step."""
    with tiny.engine(overlap=True, budget=budget) as one:
        tiny.ask(one)
        runs = []
        for _ in range(last + 5):
            one.step()
            runs.append(bool(one.scheduler.running))
    assert runs[last - 1] and not any(runs[last:])


def test_forks_give_the_tokens_of_separate_requests(tiny):
    """n samples of a request give the same tokens as n separate requests."""
    params = {"seed": 3, "max_tokens": 14, "temperature": 1.2}
    with tiny.engine(overlap=True) as one:
        one.add(tiny.PREFIX, SamplingParams(n=4, **params))
        forks = tiny.drain(one)[0]["request-0"].outputs
    with tiny.engine(prefix_caching=False) as one:
        for index in range(4):
            one.add(tiny.PREFIX, SamplingParams(**params)).samples[0].index = index
        copies = [output.outputs[0] for output in tiny.drain(one)[0].values()]
    assert [c.token_ids for c in forks] == [c.token_ids for c in copies]
    assert len({c.token_ids for c in forks}) == 4


@pytest.mark.parametrize(
    "params, order",
    [
        (SamplingParams(max_tokens=6, ignore_eos=True), ["launch", "launch", "collect"]),
        (SamplingParams(max_tokens=6, frequency_penalty=1.0), ["launch", "collect", "launch"]),
        (BeamSearchParams(2, 6), ["launch", "collect", "launch"]),
    ],
    ids=["draws", "penalties", "beams"],
)
def test_a_step_is_launched_before_the_last_is_collected(tiny, monkeypatch, params, order):
    """Except for beams and penalties, which need the tokens."""
    calls = []
    with tiny.engine(overlap=True) as one:
        for name in ("launch", "collect"):
            real = getattr(one._runner, name)
            spy = lambda x, name=name, real=real: (calls.append(name), real(x))[1]
            monkeypatch.setattr(one._runner, name, spy)
        one.add("text", params)
        tiny.drain(one)
    assert calls[:3] == order
    assert calls.count("launch") == 6, "no step is wasted on an end that is known"


def test_one_penalised_request_among_others(tiny, expected):
    with tiny.engine(overlap=True) as one:
        for seed in range(5):
            one.add(f"{seed}", SamplingParams(seed=seed, max_tokens=10 + seed, n=2))
        requests = tiny.ask(one)
        last, _ = tiny.drain(one)
    assert tiny.visible({r.request_id: last[r.request_id] for r in requests}) == expected


def test_tokens_sampled_after_the_end_are_dropped(tiny):
    """The end of a sample is known one step late, and one token was computed in vain."""
    with tiny.engine(overlap=False) as one:
        one.add("no prefix", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        token_ids = tiny.drain(one)[0]["request-0"].outputs[0].token_ids
    stop = token_ids[7]
    first = token_ids.index(stop)
    with tiny.engine(overlap=True) as one:
        params = SamplingParams(
            temperature=0, max_tokens=30, stop_token_ids=[stop], ignore_eos=True
        )
        request = one.add("no prefix", params)
        output = tiny.drain(one)[0]["request-0"].outputs[0]
        assert output.token_ids == token_ids[: first + 1] == tuple(request.samples[0].token_ids)
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert one.stats().steps == first + 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_grows_to_the_whole_output(tiny, expected, overlap):
    """Texts only grow, no character is cut, and best_of reports only at the end."""
    with tiny.engine(overlap=overlap) as one:
        requests = {r.request_id: r for r in tiny.ask(one)}
        last, outputs = tiny.drain(one)
    assert tiny.visible(last) == expected
    texts = dict.fromkeys(itertools.product(requests, range(3)), "")
    for output in outputs:
        if requests[output.request_id].is_ranked_at_end:
            assert output.finished
        for c in output.outputs:
            before = texts[output.request_id, c.index]
            assert c.text.startswith(before) or requests[output.request_id].is_ranked_at_end
            assert c.finished or not c.text.endswith("\ufffd")
            texts[output.request_id, c.index] = c.text


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sample_that_ends_early_is_reported_complete_at_once(tiny, overlap):
    """Its text includes the held-back part: half a character, or a possible beginning of a stop
    string.
    """
    params = SamplingParams(seed=3, n=4, max_tokens=60, temperature=1.5, stop=["~" * 30])
    with tiny.engine(overlap=overlap) as one:
        one.add("x", params)
        _, outputs = tiny.drain(one)
    columns = zip(*(output.outputs for output in outputs), strict=True)
    ended = [[c for c in column if c.finished] for column in columns]
    assert max(map(len, ended)) > 9, "one of them ends long before the last"
    for many in ended:
        assert len({(c.text, c.token_ids, c.finish_reason) for c in many}) == 1
        assert many[0].text == ByteTokenizer().decode(many[0].token_ids)


class Counted(list):
    """A list that counts the items that are read."""

    num_read = 0

    def __iter__(self):
        Counted.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, place):
        items = super().__getitem__(place)
        Counted.num_read += len(items) if isinstance(place, slice) else 1
        return items


def test_the_cost_of_a_stream_is_linear(tiny, monkeypatch):
    """List items read, tokens decoded and characters held back are bounded per token, whatever the
    length.
    """
    reader_of = pytest.importorskip("onchip.server.responses").DeltaReader
    params = SamplingParams(max_tokens=200, ignore_eos=True, logprobs=0, stop=["~" * 9])
    decoded, num_chars, decode = 0, 0, ByteTokenizer.decode

    def counting(self, token_ids):
        nonlocal decoded
        decoded += len(token_ids)
        return decode(self, token_ids)

    monkeypatch.setattr(ByteTokenizer, "decode", counting)
    monkeypatch.setattr(Counted, "num_read", 0)
    with tiny.engine(overlap=True) as one:
        (sample,), reader = one.add("x", params).samples, reader_of(1)
        sample.token_ids, sample.logprobs = Counted(), Counted()
        while one.has_work:
            num_chars += sum(len(delta.text) for delta in reader.read_new(one.step()))
            if sample.detokenizer is not None:
                kept = [
                    len(x) for x in vars(sample.detokenizer).values() if isinstance(x, (str, list))
                ]
                assert max(kept) < 80
    assert num_chars == len(sample.text) > 100 and len(sample.token_ids) == 200
    assert Counted.num_read < 12 * 200 and decoded < 80 * 200


def test_without_streaming_only_the_end_is_reported(tiny, expected):
    with tiny.engine(overlap=True) as one:
        tiny.ask(one, stream=False)
        last, outputs = tiny.drain(one)
    assert len(outputs) == len(last) and tiny.visible(last) == expected


def test_two_engines_in_one_process(tiny, expected):
    with tiny.engine(overlap=True, num_pages=70) as a, tiny.engine(overlap=True) as b:
        tiny.ask(a)
        tiny.ask(b)
        outputs = [], []
        while a.has_work or b.has_work:
            outputs[0].extend(a.step())
            outputs[1].extend(b.step())
        for one, many in zip((a, b), outputs, strict=True):
            last = {output.request_id: output for output in many}
            assert tiny.visible(last) == expected
            tiny.check_empty(one)


def test_stop_texts_end_a_sample_before_them(tiny):
    with tiny.engine() as one:
        one.add("no prefix", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        text = tiny.drain(one)[0]["request-0"].outputs[0].text
        stop = text[5:8]  # three characters: it appears within one token, and over several
        cut = text.index(stop)
        params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
        one.add("no prefix", SamplingParams(stop=["never there", stop], **params))
        late = one.add("no prefix", SamplingParams(stop=[stop], min_tokens=40, **params))
        last, outputs = tiny.drain(one)
    output = last["request-1"].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text[:cut], "stop", stop)
    assert all(
        text[:cut].startswith(o.outputs[0].text) for o in outputs if o.request_id == "request-1"
    )
    assert late.samples[0].num_tokens == 40


def test_stop_texts_end_samples_of_best_of(tiny):
    params = {"seed": 4, "max_tokens": 30, "ignore_eos": True, "n": 1, "best_of": 3}
    with tiny.engine() as one:
        one.add("no prefix", SamplingParams(**params))
        whole = tiny.drain(one)[0]["request-0"].outputs[0].text
        stop = whole[4]
        one.add("no prefix", SamplingParams(stop=stop, **params))
        output = tiny.drain(one)[0]["request-1"].outputs[0]
    assert output.stop_reason == stop and stop not in output.text


@pytest.mark.parametrize("overlap", [False, True])
def test_cancelled_at_any_step_its_pages_are_free_at_once(tiny, overlap):
    for when in range(6):
        with tiny.engine(overlap=overlap, budget=16) as one:
            one.add(tiny.PREFIX, SamplingParams(n=3, max_tokens=9), request_id="gone")
            for _ in range(when):
                one.step()
            assert one.cancel("gone") and not one.cancel("gone") and not one.cancel("never there")
            assert not one.cache.pool.tables
            one.add("x", SamplingParams(max_tokens=3, ignore_eos=True), request_id="gone")
            _, outputs = tiny.drain(one)
            assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
            assert {o.prompt for o in outputs} == {"x"}, "of the first one nothing is told any more"


def test_a_deadline_cuts_a_request_off(tiny):
    now = [0.0]
    with tiny.engine(clock=lambda: now[0]) as one:
        one.add("x", SamplingParams(max_tokens=50, ignore_eos=True), deadline_s=5.0)
        for _ in range(4):
            one.step()
        now[0] = 6.0
        (output,) = one.step()
        tiny.check_empty(one)
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 4


def test_rejections_and_errors_have_messages(tiny):
    with tiny.engine() as one:
        assert isinstance(one.add("x" * 200, SamplingParams(max_tokens=100)), RejectedRequest)
        for prompt, params, match in (
            ("", None, "the prompt is empty"),
            ([], None, "the prompt is empty"),
            ([5, 999], None, "token 999; vocab_size=257"),
            (["a"], None, "token ids must be integers"),
            ("x", SamplingParams(stop_token_ids=[257]), "stop_token_ids names token 257"),
            ("\ud800", None, "surrogates not allowed"),
        ):
            with pytest.raises(ValueError, match=match):
                one.add(prompt, params)
        for options, match in (
            ({"deadline_s": "soon"}, "deadline_s='soon' must be a number"),
            ({"deadline_s": float("nan")}, "deadline_s=nan must be a number"),
            ({"salt": "text"}, "salt='text' must be bytes"),
            ({"priority": 1.5}, "priority=1.5 must be a whole number"),
        ):
            with pytest.raises(ValueError, match=match):
                one.add("x", **options)
        assert not one.has_work and one.step() == []
    with pytest.raises(ValueError, match="the end token 257 is not in the vocabulary"):
        tiny.engine(eos_token_ids=(1, 257))


def test_without_a_tokenizer_outputs_are_tokens_only(tiny):
    limits = Limits(256, 64, 8)
    with tiny.Engine(tiny.model(), None, limits=limits, num_pages=99) as one:
        with pytest.raises(ValueError, match="no tokenizer: give the prompt as token ids"):
            one.add("text")
        with pytest.raises(ValueError, match="stop texts need a tokenizer"):
            one.add([1], SamplingParams(stop="x"))
        one.add([1, 2], SamplingParams(max_tokens=3, logprobs=1, ignore_eos=True))
        (output,) = tiny.drain(one)[0].values()
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3


def test_logprobs_equal_those_of_the_model(tiny, monkeypatch):
    """Logprobs of the prompt, in chunks, and of sampled tokens, each with the token's text."""
    prompt = tiny.PREFIX.encode()
    with tiny.engine(budget=17) as one:
        one.add(tiny.PREFIX, SamplingParams(temperature=0, max_tokens=1))
        tiny.drain(one)
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=3)
        one.add(tiny.PREFIX, params)
        output = tiny.drain(one)[0]["request-1"]
    drawn = output.outputs[0]
    tokens = torch.tensor([*prompt, *drawn.token_ids])
    with torch.no_grad():
        table = tiny.model().logits(tiny.model().full(tokens[None])[0]).log_softmax(-1)
    given = [*output.prompt_logprobs[1:], *drawn.logprobs]
    assert output.prompt_logprobs[0] is None and len(given) == len(tokens) - 1
    for place, known in enumerate(given):
        token = int(tokens[place + 1])
        assert known[token].logprob == pytest.approx(float(table[place, token]), abs=1e-4)
        assert known[token].rank == int((table[place] > table[place, token]).sum()) + 1
        best = table[place].topk(3 if place < len(prompt) - 1 else 2).indices.tolist()
        assert set(known) == {*best, token}
        assert known[token].decoded_token == ByteTokenizer().decode([token])


def test_prompt_logprobs_are_reported_once_after_a_recomputation(tiny):
    with tiny.engine(budget=17, prefix_caching=False) as one:
        request = one.add(tiny.PREFIX, SamplingParams(max_tokens=2, prompt_logprobs=0))
        one.step()
        one.step()
        one.scheduler.preempt(request)
        output = tiny.drain(one)[0]["request-0"]
    assert len(output.prompt_logprobs) == len(tiny.PREFIX)
    assert all(
        ord(c) in p for c, p in zip(tiny.PREFIX[1:], output.prompt_logprobs[1:], strict=True)
    )


def test_a_row_that_is_not_finite_fails_alone(tiny, expected):
    sick = tiny.model.__wrapped__()
    with torch.no_grad():
        sick.embed[ord("~")] = float("nan")
    limits = Limits(256, 40, 12)
    options = {"num_pages": 300, "page_size": 4, "eos_token_ids": tiny.EOS, "seed": 1}
    options["execution"] = ExecutionConfig(overlap=True)
    with tiny.Engine(sick, ByteTokenizer(), limits=limits, **options) as one:
        bad = one.add("a ~", SamplingParams(max_tokens=5))
        tiny.ask(one)
        last, _ = tiny.drain(one)
    assert bad.status is Status.FINISHED_ERROR and bad.error == "the logits are not finite"
    assert last.pop("request-0").outputs[0].finish_reason == "error"
    assert tiny.visible(last) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_raises_fails_all_requests_and_the_engine(tiny, monkeypatch, overlap):
    with tiny.engine(overlap=overlap) as one:
        requests = tiny.ask(one)
        for _ in range(3):
            one.step()
        monkeypatch.setattr(one.model, "run", lambda *args: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
            while True:
                one.step()
        assert all(request.finished for request in requests)
        failed = [r for r in requests if r.status is Status.FINISHED_ERROR]
        assert {o.request_id for o in caught.value.outputs} == {r.request_id for r in failed}
        assert failed and all("division" in request.error for request in failed)
        assert not one.has_work
        for call in (one.step, lambda: one.add("x")):
            with pytest.raises(EngineError, match="has failed: ZeroDivisionError"):
                call()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_step_ends_all_requests_and_not_the_engine(tiny, monkeypatch, overlap):
    """The next step reports all requests but the cancelled one; then the engine works as before."""

    def interrupted(*args):
        raise KeyboardInterrupt

    with tiny.engine(overlap=overlap, host_pages=100, num_pages=60) as one:
        expected = tiny.ask(one) and tiny.visible(tiny.drain(one)[0])
        generated = one.stats().tokens_generated
        requests = tiny.ask(one)
        for _ in range(9):
            one.step()
        with monkeypatch.context() as patch:
            patch.setattr(one.model, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                one.step()
        unfinished = [request for request in requests if not request.finished]
        assert one.has_work and len(unfinished) > 2
        one.cancel(unfinished[0].request_id)
        tiny.check_empty(one)
        outputs = one.step()
        assert [o.request_id for o in outputs] == [r.request_id for r in unfinished[1:]]
        assert all(o.finished and o.outputs[0].finish_reason == "abort" for o in outputs)
        assert not one.has_work and one.stats().tokens_generated > generated
        one._num_accepted = 0
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == expected


def test_close_frees_all_memory(tiny):
    one = tiny.engine(host_pages=50, overlap=True)
    tiny.ask(one)
    for _ in range(5):
        one.step()
    held = [weakref.ref(x) for x in (one.cache, one.cache.pages.k, one.tier, one.scheduler)]
    one.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    one.close()
    assert not one.has_work and not one.cancel("request-0") and one.stats().steps > 0
    with pytest.raises(ValueError, match="the engine was closed"):
        one.add("x")


def test_stats_count_tokens_pages_and_requests(tiny):
    with tiny.engine(overlap=True) as one:
        tiny.ask(one)
        stats = []
        thread = threading.Thread(target=lambda: stats.extend(one.stats() for _ in range(2000)))
        thread.start()
        one.step()
        busy = one.stats()
        assert busy.running + busy.waiting == len(tiny.PARAMS)
        assert busy.pages_free < busy.pages_total
        last, _ = tiny.drain(one)
        thread.join()
        idle = one.stats()
        assert len(stats) == 2000 and all(s.pages_free <= s.pages_total for s in stats)
        assert (idle.running, idle.waiting, idle.request_pages) == (0, 0, {})
        assert idle.pages_free == idle.pages_total == 299 and idle.pages_cached > 0
        assert idle.tokens_cached == sum(output.num_cached_tokens for output in last.values())
        drawn = sum(len(c.token_ids) for output in last.values() for c in output.outputs)
        assert idle.tokens_generated >= drawn and idle.steps > 0 and idle.last_step_s > 0
