"""attn_implementation="onchip": models give the same results as with "eager"."""

import copy
import gc
import inspect
import re
from pathlib import Path

import pytest
import torch

import onchip
from onchip.integrations import transformers as adapter
from onchip.masks import deferred
from onchip.models import interface
from tests.integrations import families
from tests.integrations.families import DECODERS, OTHERS, padding
from tests.models.foreign_models import mark_most_slow

transformers = pytest.importorskip("transformers")

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
BATCH, TOKENS = 3, 23


@pytest.fixture(autouse=True, scope="module")
def _registered():
    adapter.register()


@pytest.fixture
def words():
    return torch.randint(3, 131, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))


def as_name(one, name):
    one.set_attn_implementation(name)
    return one


def both(kind, compute):
    """The results of compute(model) with eager attention and with onchip."""
    one = families.model(kind)
    eager = compute(as_name(one, "eager"))
    ours = compute(as_name(one, "onchip"))
    return eager, ours


def close(ours, eager, seen=None):
    """The rule for fp32: within 1e-5 of the largest. Rows of padding are ignored."""
    seen = 1 if seen is None else seen[..., None]
    error, most = ((ours - eager) * seen).abs().max(), (eager * seen).abs().max()
    assert error <= 1e-5 * most, f"{error / most:.1e}"


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("kind", mark_most_slow(DECODERS))
@torch.no_grad()
def test_logits_equal_eager(kind, side, words):
    seen = None if side is None else padding(BATCH, TOKENS, side)
    eager, ours = both(kind, lambda one: one(words, attention_mask=seen).logits)
    close(ours, eager, seen)


@pytest.mark.parametrize("kind", mark_most_slow(DECODERS))
@torch.no_grad()
def test_greedy_tokens_equal_eager_with_left_padding(kind, words):
    seen = padding(BATCH, TOKENS, "left")
    eager, ours = both(kind, lambda one: one.generate(words, attention_mask=seen, **GREEDY))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_greedy_tokens_from_a_cache_of_fixed_size(kind, words):
    seen = padding(BATCH, TOKENS, "left")
    static = {"cache_implementation": "static", "disable_compile": True}
    compute = lambda one: one.generate(words, attention_mask=seen, **GREEDY, **static)
    eager, ours = both(kind, compute)
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("kind", mark_most_slow(OTHERS))
@torch.no_grad()
def test_encoders_cross_attention_and_position_bias(kind):
    given = families.inputs(kind)
    answer = lambda one: one(**given)
    eager, ours = both(kind, answer)
    names = [name for name in ("logits", "last_hidden_state") if name in eager]
    seen = given.get("attention_mask") if names == ["last_hidden_state"] else None
    close(ours[names[0]], eager[names[0]], seen)


@pytest.mark.parametrize("kind", ["bart", "whisper", "t5"])
@torch.no_grad()
def test_greedy_tokens_of_encoders_with_decoders(kind):
    given = {k: v for k, v in families.inputs(kind).items() if not k.startswith("decoder")}
    length = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    eager, ours = both(kind, lambda one: one.generate(**given, **length))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("kind", ["llama", "mistral", "llama4_text"])
@torch.no_grad()
def test_a_prompt_in_pieces_equals_the_whole_prompt(kind, words):
    """Several queries at the end of more keys."""
    one = as_name(families.model(kind), "onchip")
    whole = one(words).logits
    first = one(words[:, :9])
    rest = one(words[:, 9:], past_key_values=first.past_key_values).logits
    close(torch.cat([first.logits, rest], 1), whole)


def gradients(one, words, seen, **options):
    one.zero_grad()
    logits = one(words, attention_mask=seen, **options).logits
    (logits.square() * seen[..., None]).sum().backward()
    return {name: weight.grad.clone() for name, weight in one.named_parameters()}


def equal_gradients(ours, eager):
    for name, expected in eager.items():
        error = (ours[name] - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("kind", ["llama", "gemma2", "deepseek_v3", "cohere2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_equal_eager(kind, side, words):
    seen = padding(BATCH, TOKENS, side)
    eager, ours = both(kind, lambda one: gradients(one, words, seen, use_cache=False))
    equal_gradients(ours, eager)


def test_precise_delta_keeps_the_residuals(words):
    """In every layer, under a name that was registered with precise_delta."""
    adapter.register("precise", precise_delta=True)
    one = copy.deepcopy(families.model("llama")).bfloat16().train()

    def saved_bytes(name):
        kept = {}

        def pack(t):
            kept[t.data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            as_name(one, name)(words, use_cache=False)
        return sum(t.numel() * t.element_size() for t in kept.values())

    config = one.config
    out = BATCH * TOKENS * config.num_attention_heads * config.head_dim
    more = saved_bytes("precise") - saved_bytes("onchip")
    assert more == config.num_hidden_layers * out * 2


def test_gradients_of_sinks(words):
    """Without padding: in eager, rows of padding contribute to the gradient of sinks."""
    eager, ours = both("gpt_oss", lambda one: gradients(one, words, torch.ones_like(words)))
    equal_gradients(ours, eager)
    assert any("sinks" in name for name in ours)


def test_gradients_of_a_position_bias():
    given = families.inputs("t5")

    def compute(one):
        one.zero_grad()
        one(**given).logits.square().sum().backward()
        return {n: w.grad.clone() for n, w in one.named_parameters() if "relative" in n}

    eager, ours = both("t5", compute)
    exact = compute(copy.deepcopy(as_name(families.model("t5"), "eager")).double())
    assert len(ours) == 2
    for name, expected in exact.items():  # each is a sum of thousands of terms, in any order
        error, least = ((outputs[name] - expected).abs().max() for outputs in (ours, eager))
        assert error <= max(1e-5 * expected.abs().max(), 2 * least), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_the_same_dropout(reentrant, words):
    """Masks pass through checkpoints, and dropout uses torch's own generator."""
    one = copy.deepcopy(as_name(families.model("mistral"), "onchip")).train()
    for layer in one.model.layers:
        layer.self_attn.attention_dropout = 0.4
    seen = padding(BATCH, TOKENS, "right")
    runs = []
    for checkpointing in (False, True):
        if checkpointing:
            one.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        runs.append(gradients(one, words, seen, use_cache=False))
    for name, expected in runs[0].items():
        torch.testing.assert_close(runs[1][name], expected, rtol=0, atol=0)
    torch.manual_seed(4)
    other = gradients(one, words, seen, use_cache=False)
    assert any(not torch.equal(other[name], runs[0][name]) for name in other)


class TestPacking:
    """Packed sequences give the same results as each alone."""

    LENGTHS = (9, 1, 13)

    @pytest.fixture
    def packed(self, words):
        positions = torch.cat([torch.arange(n) for n in self.LENGTHS])[None]
        return words[:1], positions

    def alone(self, one, words):
        return torch.cat([one(part).logits for part in words.split(self.LENGTHS, 1)], 1)

    # gpt_oss gives its positions to attention, but not to the mask
    @pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "qwen2", "qwen3", "gpt_oss"])
    @torch.no_grad()
    def test_positions_that_start_again(self, kind, packed):
        words, positions = packed
        one = as_name(families.model(kind), "onchip")
        together = one(words, position_ids=positions, use_cache=False).logits
        close(together, self.alone(one, words))

    @pytest.mark.parametrize("start", [[0, 1, 2, 4, 0], [1, 2, 0, 1, 2], [0, 1, 2, 3, 4], [0] * 4])
    def test_other_positions_are_one_sequence(self, start):
        """Except for zeros alone: each is a sequence of one token."""
        row = adapter._PackedRow.from_positions(torch.tensor([start]))
        assert (row is None) == any(start)

    @torch.no_grad()
    def test_positions_are_read_again_after_a_write(self, packed):
        words, positions = packed
        one = as_name(families.model("gpt_oss"), "onchip")
        row = torch.arange(words.shape[1])[None].contiguous()
        whole = one(words, position_ids=row, use_cache=False).logits
        row.copy_(positions)
        close(one(words, position_ids=row, use_cache=False).logits, self.alone(one, words))
        assert not torch.allclose(whole, self.alone(one, words))

    @pytest.mark.parametrize("use_cache", [False, True])
    @pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
    @torch.no_grad()
    def test_offsets_of_a_collator_that_flattens(self, kind, use_cache, packed):
        words, positions = packed
        one = as_name(families.model(kind), "onchip")
        cu = torch.tensor([0, *self.LENGTHS]).cumsum(0).int()
        options = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 13, "max_length_k": 13}
        together = one(words, position_ids=positions, use_cache=use_cache, **options).logits
        close(together, self.alone(one, words))

    @pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
    def test_offsets_need_no_mask(self, kind, packed, monkeypatch):
        """Documents that are also in the mask become sequences, and a window becomes an option."""
        words, positions = packed
        one = as_name(families.model(kind), "onchip")
        cu = torch.tensor([0, *self.LENGTHS]).cumsum(0).int()
        options = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 13, "max_length_k": 13}
        monkeypatch.setattr(adapter, "attention", None)
        with torch.no_grad():
            one(words, position_ids=positions, use_cache=False, **options)

    @torch.no_grad()
    def test_offsets_in_a_graph(self, packed):
        words, positions = packed
        one = as_name(copy.deepcopy(families.model("mistral")), "onchip")
        one.model.layers = one.model.layers[:1]
        cu = torch.tensor([0, *self.LENGTHS]).cumsum(0).int()
        options = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 13, "max_length_k": 13}
        compiled = torch.compile(one, backend="eager", fullgraph=True)
        together = compiled(words, position_ids=positions, use_cache=False, **options).logits
        close(together, self.alone(one, words))

    def test_gradients(self, packed):
        words, positions = packed
        one = as_name(families.model("mistral"), "onchip")
        runs = []
        for compute in (
            lambda: one(words, position_ids=positions, use_cache=False).logits,
            lambda: self.alone(one, words),
        ):
            one.zero_grad()
            compute().square().sum().backward()
            runs.append({name: weight.grad.clone() for name, weight in one.named_parameters()})
        equal_gradients(*runs)


class TestStructure:
    """Masks are intervals: no cell of transformers' own mask functions is evaluated."""

    @pytest.fixture
    def no_cells(self, monkeypatch):
        def refuse(**_):
            raise AssertionError("cells were evaluated")

        monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", refuse)

    @pytest.mark.parametrize("side", [None, "left", "right"])
    @pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "llama4_text", "phimoe"])
    @torch.no_grad()
    def test_of_decoders(self, kind, side, words, no_cells):
        seen = None if side is None else padding(BATCH, TOKENS, side)
        as_name(families.model(kind), "onchip")(words, attention_mask=seen)

    @pytest.mark.parametrize("kind", ["bert", "modernbert", "bart"])
    @torch.no_grad()
    def test_of_encoders(self, kind, no_cells):
        as_name(families.model(kind), "onchip")(**families.inputs(kind))

    def test_of_packed_sequences(self, words, no_cells):
        positions = torch.arange(TOKENS).remainder(8).expand(BATCH, -1)
        one = as_name(families.model("mistral"), "onchip")
        one(words, position_ids=positions, use_cache=False)

    def test_a_window_is_an_option_not_a_mask(self, words, monkeypatch):
        calls = []
        spy = lambda *qkv, **options: calls.append(options) or onchip.attention(*qkv, **options)
        monkeypatch.setattr(adapter, "attention", spy)
        with torch.no_grad():
            as_name(families.model("gemma3_text"), "onchip")(words)
        assert [o.get("window_size") for o in calls] == [(6, 0), None]
        assert all(o["causal"] and "mask" not in o for o in calls)

    @pytest.mark.slow
    def test_blocks_are_built_once_for_all_layers_and_released(self, words, monkeypatch):
        built = []
        spy = lambda *args: built.append(1) or onchip.masks.build(*args)
        gc.collect()
        before = len(deferred._built)
        monkeypatch.setattr(deferred, "build", spy)
        with torch.no_grad():
            one = as_name(families.model("llama"), "onchip")
            one(words, attention_mask=padding(BATCH, TOKENS, "left"))
        assert len(built) == 1
        gc.collect()
        assert len(deferred._built) == before

    def test_padding_with_gaps_is_evaluated_cell_by_cell(self, words):
        seen = padding(BATCH, TOKENS, "right")
        seen[1, 4:9] = 0
        with torch.no_grad():
            eager, ours = both("mistral", lambda one: one(words, attention_mask=seen).logits)
        close(ours, eager, seen)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    @torch.no_grad()
    def test_masks_that_users_make(self, dtype, words):
        seen = torch.rand(BATCH, 1, TOKENS, TOKENS) < 0.6
        seen |= torch.eye(TOKENS, dtype=torch.bool)
        mask = seen if dtype == torch.bool else torch.where(seen, torch.randn(seen.shape), -1e9)
        theirs = torch.where(seen, 0.0, -1e9) if dtype == torch.bool else mask
        one = families.model("llama")
        eager = as_name(one, "eager")(words, attention_mask=theirs).logits
        ours = as_name(one, "onchip")
        close(ours(words, attention_mask=mask).logits, eager)
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        mask.copy_(causal if dtype == torch.bool else torch.where(causal, 0.0, -1e9))
        close(ours(words, attention_mask=mask).logits, ours(words).logits)

    @torch.no_grad()
    def test_mask_functions_that_users_make(self, words):
        """An unknown mask_function is evaluated: bounds if it is an interval, otherwise cells."""
        prefix = lambda b, h, q, k: k < 5
        holes = lambda b, h, q, k: (k % 3 == 0) & (k < q + 4)
        for rule, kind in ((prefix, torch.int32), (holes, torch.bool)):
            mask = transformers.masking_utils.create_causal_mask(
                config=as_name(families.model("llama"), "onchip").config,
                inputs_embeds=torch.zeros(BATCH, TOKENS, 48),
                attention_mask=None,
                past_key_values=None,
                or_mask_function=rule,
            )
            assert mask.dtype == kind
            at = torch.arange(TOKENS)
            expected = (at <= at[:, None]) | rule(0, 0, at[:, None], at)
            dense = onchip.masks.build(mask, BATCH, 1, TOKENS, TOKENS).to_dense()
            assert torch.equal(dense, expected.expand_as(dense))


class Logits(torch.nn.Module):
    def __init__(self, one):
        super().__init__()
        self.one = one

    def forward(self, words, attention_mask=None, position_ids=None):
        options = {"attention_mask": attention_mask, "position_ids": position_ids}
        return self.one(words, use_cache=False, **options).logits


class TestGraphs:
    """Whole models in one graph, which builds the mask when it runs."""

    CASES = {
        "causal": {},
        "padding": {"attention_mask": padding(BATCH, TOKENS, "left")},
        "documents": {
            "position_ids": torch.arange(TOKENS).remainder(9).expand(BATCH, -1),
            "use_cache": False,
        },
    }

    @pytest.mark.parametrize(
        "case", [pytest.param("causal", marks=pytest.mark.slow), "padding", "documents"]
    )
    def test_compiles_without_a_graph_break(self, case, words):
        one = self.shallow()
        given = self.CASES[case]
        seen = given.get("attention_mask", torch.ones_like(words))[..., None]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
        runs = []
        for each in (one, compiled):
            one.zero_grad()
            logits = each(words, **given).logits * seen
            logits.square().sum().backward()
            runs.append([logits.detach(), *(weight.grad for weight in one.parameters())])
        assert not torch._dynamo.utils.counters["graph_break"]
        for ours, eager in zip(*runs, strict=True):
            torch.testing.assert_close(ours, eager, rtol=0, atol=0)

    @pytest.mark.parametrize("case", CASES)
    def test_exports_for_any_length(self, case, words):
        given = {k: v for k, v in self.CASES[case].items() if k != "use_cache"}
        module, length = Logits(self.shallow()), torch.export.Dim("length", min=9, max=256)
        sizes = {name: {1: length} for name in ("words", *given)}
        with torch.no_grad():
            program = torch.export.export(module, (words,), given, dynamic_shapes=sizes)
            more = {name: torch.cat([t, t[:, -1:].expand(-1, 17)], 1) for name, t in given.items()}
            more_words = torch.cat([words, words[:, :17]], 1)
            ours, eager = program.module()(more_words, **more), module(more_words, **more)
        seen = more.get("attention_mask", torch.ones_like(more_words))[..., None]
        torch.testing.assert_close(ours * seen, eager * seen, rtol=0, atol=0)
        assert any("onchip.attention" in str(node.target) for node in program.graph.nodes)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "deepseek_v3", "cohere2"])
    def test_compiles_other_families(self, kind, words):
        one = copy.deepcopy(as_name(families.model(kind), "onchip"))
        if hasattr(one, "set_experts_implementation"):
            one.set_experts_implementation("batched_mm")
        torch._dynamo.reset()
        compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
        given = self.CASES["padding"]
        with torch.no_grad():
            ours, eager = (each(words, **given).logits for each in (compiled, one))
        close(ours, eager, given["attention_mask"])

    @pytest.mark.slow
    @torch.no_grad()
    def test_decodes_in_one_graph(self, words):
        """Steps over a cache of fixed size: one graph, no break, the tokens of eager."""
        one = copy.deepcopy(families.model("mistral"))
        seen = padding(BATCH, TOKENS, "left")
        eager = as_name(one, "eager").generate(words, attention_mask=seen, **GREEDY)
        as_name(one, "onchip")
        torch._dynamo.reset()
        one.forward = torch.compile(one.forward, backend="aot_eager", fullgraph=True)
        static = {"cache_implementation": "static", "disable_compile": True}
        ours = one.generate(words, attention_mask=seen, **GREEDY, **static)
        assert torch.equal(ours, eager)

    def test_a_row_with_gaps_is_refused_when_the_graph_runs(self, words):
        seen = torch.ones_like(words)
        seen[1, 4:9] = 0
        torch._dynamo.reset()
        compiled = torch.compile(self.shallow(), backend="eager", fullgraph=True)
        with torch.no_grad(), pytest.raises(ValueError, match="not an interval"):
            compiled(words, attention_mask=seen)

    def shallow(self):
        """One layer of a model with a window."""
        one = copy.deepcopy(as_name(families.model("mistral"), "onchip"))
        one.model.layers = one.model.layers[:1]
        return one


class TestRefusals:
    def test_a_name_with_another_meaning(self):
        for name in ("flash_onchip", "onchip/attention", "paged|onchip"):
            with pytest.raises(ValueError, match="another meaning"):
                adapter.register(name)

    def test_probabilities(self, words):
        q = torch.randn(1, 2, 9, 8)
        with pytest.raises(onchip.UnsupportedError, match="eager"):
            adapter.attend(torch.nn.Module(), q, q, q, None, output_attentions=True)

    @pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox"])
    def test_probabilities_that_a_model_would_collect(self, kind, words):
        """The model keeps output_attentions itself and collects the results of its modules."""
        one = as_name(families.model(kind), "onchip")
        with torch.no_grad(), pytest.raises(onchip.UnsupportedError, match="output_attentions"):
            one(words, output_attentions=True)

    def test_keywords_that_change_scores(self):
        q = torch.randn(1, 2, 9, 8)
        for name in ("indices", "score_mod", "head_mask", "block_table"):
            with pytest.raises(onchip.UnsupportedError, match=f"got {name}"):
                adapter.attend(torch.nn.Module(), q, q, q, None, **{name: torch.ones(1)})

    def test_a_mask_that_a_model_changed(self):
        q, mask = torch.randn(1, 2, 9, 8), torch.zeros(1, 1, 9, 9, dtype=torch.int32)
        with pytest.raises(onchip.UnsupportedError, match="neither bool nor float"):
            adapter.attend(torch.nn.Module(), q, q, q, mask)

    def test_a_mask_over_other_keys(self):
        q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 11, 8)
        masking = transformers.masking_utils
        options = {"batch_size": 1, "q_length": 9, "kv_length": 9, "device": "cpu"}
        rule = masking.sliding_window_causal_mask_function(4)
        made = adapter.mask(mask_function=rule, local_size=4, **options)
        adapter.attend(torch.nn.Module(), q, q, q, made)
        with pytest.raises(onchip.UnsupportedError, match="over 9 keys, the call has 11"):
            adapter.attend(torch.nn.Module(), q, k, k, made)

    def test_offsets_of_a_batch(self):
        q, cu = torch.randn(2, 2, 9, 8), torch.tensor([0, 9], dtype=torch.int32)
        options = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
        with pytest.raises(onchip.UnsupportedError, match="batch of 2"):
            adapter.attend(torch.nn.Module(), q, q, q, None, **options)


class OwnAttention(torch.nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class LookupAttention(torch.nn.Module):
    def forward(self, x):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS["onchip"](self, x, x, x, None)


class OwnModel(transformers.PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.attention = OwnAttention()


class LookupModel(transformers.PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.attention = LookupAttention()


class TestUnsupportedModels:
    """They raise an error when the name is set."""

    SMALL = {"vocab_size": 131, "num_hidden_layers": 1, "num_attention_heads": 4}
    KINDS = {
        "falcon": (SMALL, "FalconModel chooses its attention from a table"),
        "gptj": ({"n_embd": 48, "n_layer": 1, "n_head": 4}, "GPTJModel chooses"),
        "gpt_neo": ({"num_layers": 1, "attention_types": [[["global"], 1]]}, "GPTNeoModel chooses"),
        "bloom": ({"n_layer": 1, "n_head": 4}, "BloomModel runs attention of its own"),
        "mpt": ({"n_layers": 1, "n_heads": 4}, "MptModel runs attention of its own"),
        "xlnet": ({"n_layer": 1, "n_head": 4, "d_model": 48}, "XLNetModel runs attention"),
        "deberta-v2": (SMALL, "DebertaV2Model runs attention of its own"),
        "wavlm": (SMALL, "WavLMModel runs attention of its own"),
        "deepseek_v32": ({}, "DeepseekV32Model masks keys for 'eager' and 'sdpa' alone"),
        "sam": ({}, "SamVisionEncoder chooses.*larger model.*{'text_config': 'onchip'}"),
        "blip": ({}, "BlipTextModel runs attention.*{'vision_config': 'onchip'}"),
    }

    @pytest.mark.parametrize("kind", KINDS)
    def test_when_built(self, kind):
        fields, sentence = self.KINDS[kind]
        config = transformers.CONFIG_MAPPING[kind](**fields)
        with torch.device("meta"), pytest.raises(onchip.UnsupportedError, match=sentence):
            transformers.AutoModel.from_config(config, attn_implementation="onchip")

    def test_when_set_later(self):
        """transformers itself would warn and continue."""
        config = transformers.BloomConfig(hidden_size=48, n_layer=1, n_head=4, vocab_size=131)
        one = transformers.BloomForCausalLM(config)
        before = one.config._attn_implementation
        with pytest.raises(onchip.UnsupportedError, match="BloomModel runs attention of its own"):
            one.set_attn_implementation("onchip")
        one.set_attn_implementation("eager")
        assert before == "eager" == one.config._attn_implementation

    @torch.no_grad()
    def test_a_part_of_a_model(self):
        """A model of text and images with an unsupported encoder: the other part uses onchip."""
        text = families.config("qwen2").to_dict() | {"rope_parameters": {"rope_type": "default"}}
        vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"output_channels": 16, "mlp_dim": 32, "global_attn_indexes": []}
        config = transformers.GotOcr2Config(text_config=text, vision_config=vision)
        build = transformers.GotOcr2ForConditionalGeneration._from_config
        with pytest.raises(onchip.UnsupportedError, match="GotOcr2VisionEncoder runs attention"):
            build(copy.deepcopy(config), attn_implementation="onchip")
        one = build(config, attn_implementation={"text_config": "onchip"}).eval()
        assert one.model.language_model.config._attn_implementation == "onchip"
        assert one.model.vision_tower.config._attn_implementation != "onchip"
        assert one(torch.arange(11)[None]).logits.isfinite().all()

    def test_models_that_users_write(self):
        config = transformers.LlamaConfig(attn_implementation="onchip")
        LookupModel(config)
        with pytest.raises(onchip.UnsupportedError, match="OwnModel runs.*OwnAttention"):
            OwnModel(config)

    def test_models_without_attention_take_any_name(self):
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
        config._attn_implementation = "onchip"
        transformers.ResNetModel(config)


class TestKeywords:
    """Keywords that a model passes to its modules for other purposes have no effect."""

    @pytest.mark.parametrize(
        "name", ["num_items_in_batch", "seq_idx", "labels", "decoder_input_ids", "any_novelty"]
    )
    def test_keywords_for_other_purposes(self, name):
        q = torch.randn(1, 2, 9, 8)
        expected, _ = adapter.attend(torch.nn.Module(), q, q, q, None)
        ours, _ = adapter.attend(torch.nn.Module(), q, q, q, None, **{name: torch.arange(9)})
        assert torch.equal(ours, expected)

    def test_every_keyword_of_transformers_is_handled(self):
        """Every keyword that its modules pass to an attention function is supported, refused, or
        has no effect on scores: a version with a new keyword needs a decision.
        """
        served = {*inspect.signature(adapter.attend).parameters, *adapter._PACKING}
        served |= {"scaling", "softcap", "s_aux", "output_attentions"}
        indifferent = {"deterministic", "position_ids", "sliding_window"}  # masks contain windows
        call = re.compile(r"\battention_interface\((.*?)\n\s*\)", re.DOTALL)
        folder = Path(transformers.__file__).parent / "models"
        keywords = set()
        for file in folder.glob("*/modeling_*.py"):
            for arguments in call.findall(file.read_text()):
                keywords |= set(re.findall(r"^\s+(\w+)=", arguments, re.MULTILINE))
        assert {"scaling", "dropout", "indices", "position_bias"} <= keywords
        assert keywords - served - indifferent - interface._REFUSED == set()


@pytest.mark.parametrize("grads", [False, True])
def test_a_last_dimension_that_is_not_contiguous(grads):
    """Florence-2 attends over channels: its queries are transposed a second time."""
    base = torch.randn(3, 2, 4, 8, 9, requires_grad=grads)
    q, k, v = base.transpose(-1, -2).unbind()
    ours, _ = adapter.attend(torch.nn.Module(), q, k, v, None, is_causal=False)
    same = [t.contiguous() for t in (q, k, v)]
    expected, _ = adapter.attend(torch.nn.Module(), *same, None, is_causal=False)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    if grads:
        ours.square().sum().backward()
        assert base.grad.isfinite().all()


def test_registering_does_not_change_loaded_models():
    from transformers import AttentionInterface

    before = {name: AttentionInterface()[name] for name in ("sdpa", "flex_attention")}
    adapter.register("onchip_too")
    assert {name: AttentionInterface()[name] for name in before} == before
    one = as_name(copy.deepcopy(families.model("llama")), "onchip_too")
    with torch.no_grad():
        assert one(torch.ones(1, 9, dtype=torch.long)).logits.isfinite().all()


ON_DEVICES = [
    *(("cpu", kind) for kind in ("gpt2", "phimoe")),
    *(pytest.param("cuda", kind, marks=pytest.mark.gpu) for kind in DECODERS),
]


class TestBf16:
    """The same in bf16. Rounding may decide between tokens of about equal probability, so the
    tokens of `generate` must be greedy up to the error of bf16 itself; between experts it would
    decide more.
    """

    def model(self, kind, device, name, dtype):
        one = families.same_experts(copy.deepcopy(families.model(kind)))
        return as_name(one.to(device, dtype), name)

    def logits(self, kind, words, seen, name, dtype):
        one = self.model(kind, words.device, name, dtype)
        positions = (seen.cumsum(-1) - 1).clamp(min=0)  # as `generate` counts them
        return one(words, attention_mask=seen, position_ids=positions).logits.float()

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize(("device", "kind"), ON_DEVICES)
    @torch.no_grad()
    def test_errors_are_as_small_as_eagers(self, device, kind, side, words):
        """At most 1.2 times eager's error, the scatter between two draws of rounding errors."""
        words, seen = words.to(device), padding(BATCH, TOKENS, side).to(device)
        exact = self.logits(kind, words, seen, "eager", torch.float32)
        error = lambda name: (
            (self.logits(kind, words, seen, name, torch.bfloat16) - exact) * seen[..., None]
        )
        rms = lambda e: e.square().mean().sqrt()
        assert rms(error("onchip")) <= 1.2 * rms(error("eager"))

    @pytest.mark.parametrize(("device", "kind"), ON_DEVICES)
    @torch.no_grad()
    def test_tokens_are_greedy(self, device, kind, words):
        words, seen = words.to(device), padding(BATCH, TOKENS, "left").to(device)
        one = self.model(kind, device, "onchip", torch.bfloat16)
        tokens = one.generate(words, attention_mask=seen, **GREEDY)
        seen = torch.cat([seen, seen.new_ones(BATCH, GREEDY["max_new_tokens"])], 1)
        exact = self.logits(kind, tokens, seen, "eager", torch.float32)
        rounded = self.logits(kind, tokens, seen, "eager", torch.bfloat16)
        noise = ((rounded - exact) * seen[..., None]).abs().max()
        steps, chosen = exact[:, TOKENS - 1 : -1], tokens[:, TOKENS:, None]
        gap = steps.amax(-1) - steps.gather(-1, chosen)[..., 0]
        assert gap.max() <= 2 * noise


@pytest.mark.gpu
class TestGpu:
    @pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt_oss"])
    @torch.no_grad()
    def test_tokens_in_fp32_equal_eager(self, kind, words):
        seen = padding(BATCH, TOKENS, "left").cuda()
        one = copy.deepcopy(families.model(kind)).cuda()
        texts = [
            as_name(one, name).generate(words.cuda(), attention_mask=seen, **GREEDY)
            for name in ("eager", "onchip")
        ]
        assert torch.equal(*texts)

    def test_trains_in_one_graph(self, words):
        one = as_name(copy.deepcopy(families.model("mistral")).to("cuda", torch.bfloat16), "onchip")
        torch._dynamo.reset()
        compiled = torch.compile(one, fullgraph=True)
        seen = padding(BATCH, TOKENS, "right").cuda()
        loss = compiled(words.cuda(), attention_mask=seen, labels=words.cuda()).loss
        loss.backward()
        assert all(weight.grad.isfinite().all() for weight in one.parameters())


def test_one_row_of_queries_for_a_batch_of_keys():
    """Q-Former's learned queries: SDPA broadcasts them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 5, 16), *torch.randn(2, 3, 4, 7, 16)
    module = torch.nn.Module()
    out, _ = adapter.attend(module, q, k, v, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q.expand(3, -1, -1, -1), k, v)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize(
    "kind", ["beit", "lasr_encoder", "nemotron_asr_streaming_encoder", "t5gemma2_decoder"]
)
def test_a_model_that_computes_with_its_masks_gets_dense_ones(kind):
    from transformers.masking_utils import bidirectional_mask_function

    class Config:
        model_type = kind

    seen = torch.ones(2, 12, dtype=torch.bool)
    seen[1, 9:] = False
    arguments = {"q_length": 12, "kv_length": 12, "attention_mask": seen, "batch_size": 2}
    arguments |= {"mask_function": bidirectional_mask_function, "device": torch.device("cpu")}
    made = adapter.mask(**arguments, config=Config())
    is_added = kind == "beit"  # to a position bias
    assert made.dtype == (torch.float32 if is_added else torch.bool)
    assert torch.equal(made[:, 0, 0] == 0 if is_added else made[:, 0, 0], seen)
