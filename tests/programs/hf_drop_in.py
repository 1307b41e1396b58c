"""Models that choose their attention from a table in their own module, with onchip installed as
flash_attn. A program, because these modules look for flash_attn when they are imported.
"""

import torch
import transformers

from onchip.integrations import flash_attn

SMALL = {"vocab_size": 131, "hidden_size": 48}
KINDS = {
    "falcon": {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
    "gptj": {"n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
}


@torch.no_grad()
def main():
    flash_attn.install(transformers=True)
    words = torch.randint(3, 131, (3, 23), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(words)
    seen[0, -5:] = 0
    for kind, fields in KINDS.items():
        config = transformers.CONFIG_MAPPING[kind](**SMALL | fields)
        logits = []
        for name in ("eager", "flash_attention_2"):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
            logits.append(model.eval()(words, attention_mask=seen).logits * seen[..., None])
        eager, ours = logits
        error = (ours - eager).abs().max() / eager.abs().max()
        assert error <= 1e-5, f"{kind}: {error:.1e}"
        print(kind, "is as eager")


if __name__ == "__main__":
    main()
