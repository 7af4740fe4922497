"""LoRA-Ensemble: merged weights in plain networks, member by member."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.rivals import X, Y, count, digits, generator, vit
from tests.oracles.rivals import lora_member
from torch import nn

from sigmanens import EnsembleLoss
from sigmanens.baselines import batchensemble, lora_ensemble
from sigmanens.errors import ConversionError, InputError

IDS = torch.randint(1, 40, (5, 7), generator=torch.Generator().manual_seed(0))
WORDS = {"input_ids": IDS, "attention_mask": (torch.arange(7) < torch.arange(3, 8)[:, None]).long()}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


def trained(net: nn.Module) -> nn.Module:
    """Give every B values, as training does."""
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.5, generator=generator(4))
    return net


def test_members_of_a_vit_are_plain_networks_with_merged_weights() -> None:
    base = vit().eval()
    net = trained(lora_ensemble(base, 3, rank=2, generator=generator())).eval()
    found = net(X)
    for m in range(3):
        expected = lora_member(net, base, m, "head")(X)
        torch.testing.assert_close(found[m], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-2)


@pytest.mark.parametrize("head", ["fresh", "copy"])
def test_members_of_a_bert_are_plain_networks_with_merged_weights(head: str) -> None:
    base = bert()
    net = trained(lora_ensemble(base, 3, rank=2, head=head, generator=generator())).eval()
    found = net(**WORDS)
    for m in range(3):
        expected = lora_member(net, base, m, "classifier")(**WORDS).logits
        torch.testing.assert_close(found[m], expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_loop() -> None:
    base = vit().eval()
    net = trained(lora_ensemble(base, 2, rank=2, generator=generator())).eval()
    EnsembleLoss()(net(X), Y, net).backward()
    for m in range(2):
        plain = lora_member(net, base, m, "head")
        plain.head = copy.deepcopy(plain.head)
        plain.zero_grad()
        (F.cross_entropy(plain(X), Y) / 2).backward()
        for block in range(2):
            whole = plain.blocks[block].attn.qkv.weight.grad.chunk(3)
            parts = net.network.blocks[block].attn.qkv.children()
            for layer, grad in zip(parts, whole, strict=True):
                a, b = layer.lora_A[f"member{m}"].weight, layer.lora_B[f"member{m}"].weight
                torch.testing.assert_close(b.grad, grad @ a.T, rtol=1e-3, atol=1e-6)
                torch.testing.assert_close(a.grad, b.T @ grad, rtol=1e-3, atol=1e-6)
                assert layer.base_layer.weight.grad is None


def test_members_start_as_the_base() -> None:
    base = vit().eval()
    net = lora_ensemble(base, 3, head="copy", generator=generator())
    for member in net(X):
        torch.testing.assert_close(member, base(X), rtol=1e-4, atol=1e-5)
    first = net.network.blocks[0].attn.qkv.query
    assert not torch.equal(first.lora_A["member0"].weight, first.lora_A["member1"].weight)
    assert first.scaling == {"member0": 1.0, "member1": 1.0, "member2": 1.0}


def test_heads_are_copied_where_the_base_has_been_trained() -> None:
    base = vit().eval()
    assert isinstance(
        lora_ensemble(base, 2, head="auto", rank=2).network.head.heads[0], nn.Sequential
    )
    with torch.no_grad():
        base.norm.weight.uniform_(0.5, 1.5)
    for member in lora_ensemble(base, 2, head="auto", rank=2)(X):
        torch.testing.assert_close(member, base(X), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="expected 'fresh', 'copy' or 'auto'"):
        lora_ensemble(base, 2, head="shared")


def test_parameters() -> None:
    """M r (in + out) for each projection and M heads; the rest is frozen (arXiv 2405.14438)."""
    net = lora_ensemble(vit(), 4, rank=8, head="copy")
    added = 4 * (2 * 3 * 8 * (24 + 24))
    heads = 4 * (24 * 10 + 10)
    assert count(net, trained=True) == added + heads
    assert count(net) == count(vit()) + added + heads * 3 // 4
    words = lora_ensemble(bert(), 4, rank=8, head="copy")
    assert count(words, trained=True) == 4 * (2 * 3 * 8 * (16 + 16) + 16 * 3 + 3)


def test_targets() -> None:
    net = lora_ensemble(vit(), 2, rank=2, head="copy", targets=r"attn\.(qkv|proj)$")
    assert count(net, trained=True) == 2 * (2 * 2 * (24 + 72 + 24 + 24) + 250)
    named = lora_ensemble(vit(), 2, rank=2, head="copy", targets=["blocks.0.mlp.fc1"])
    assert count(named, trained=True) == 2 * (2 * (24 + 96) + 250)
    assert named.eval()(X).shape == (2, 6, 10)


def test_batch_ensemble_of_a_transformer() -> None:
    """Linear layers on (B, T, F): with factors of 1 each member is the base."""
    base = bert()
    for member in batchensemble(base, 3, std=0.0)(**WORDS):
        torch.testing.assert_close(member, base(**WORDS).logits, rtol=1e-4, atol=1e-5)


def test_refusals() -> None:
    with pytest.raises(ConversionError, match=r"finds no nn\.Linear in this CifarResNet"):
        lora_ensemble(digits(), 2)
    with pytest.raises(ConversionError, match=r"targets name 'a\.b': no nn\.Linear"):
        lora_ensemble(vit(), 2, targets=["a.b"])
    with pytest.raises(InputError, match="rank is 0"):
        lora_ensemble(vit(), 2, rank=0)
    with pytest.raises(InputError, match="head is 'shared'"):
        lora_ensemble(vit(), 2, head="shared")
