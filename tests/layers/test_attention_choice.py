from __future__ import annotations

import pytest

from banyan.layers.attention.choice import AttentionNeeds, choose_attention, describe, why_not

EVERYTHING = frozenset({"triton", "flashinfer", "sgl_kernel"})


def needs(capability=(9, 0), installed=EVERYTHING, head_dim=128, kv_bytes=2, model_bytes=2, device="cuda") -> AttentionNeeds:
    return AttentionNeeds(
        device=device,
        capability=capability if device == "cuda" else None,
        installed=frozenset(installed),
        head_dim=head_dim,
        kv_bytes=kv_bytes,
        model_bytes=model_bytes,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (needs(), "fa3"),
        (needs(kv_bytes=1), "flashinfer"),
        (needs((8, 0)), "flashinfer"),
        (needs((10, 0)), "flashinfer"),
        (needs((12, 0), head_dim=80), "triton"),
        (needs(head_dim=80), "fa3"),
        (needs(head_dim=512), "triton"),
        (needs(model_bytes=4), "triton"),
        (needs((7, 5)), "triton"),
        (needs(installed={"triton"}), "triton"),
        (needs(installed=()), "torch_native"),
        (needs(device="cpu"), "torch_native"),
    ],
)
def test_the_best_that_fits(given, expected):
    choice = choose_attention(given, cpu="torch_native")
    assert (choice.prefill, choice.decode) == (expected, expected)
    assert describe(choice).startswith(expected)


def test_what_is_passed_over_is_explained():
    text = describe(choose_attention(needs(installed={"triton"}), cpu="torch_native"))
    assert text == (
        "triton (best for compute capability 9.0; not fa3: sgl_kernel is not installed; "
        "not flashinfer: flashinfer is not installed)"
    )


def test_phases_are_chosen_apart():
    choice = choose_attention(needs(), both="triton", prefill="flashinfer", cpu="torch_native")
    assert describe(choice) == "prefill flashinfer (as given), decode triton (as given)"
    choice = choose_attention(needs(), decode="triton", cpu="torch_native")
    assert (choice.prefill, choice.decode, choice.why["prefill"][:4]) == ("fa3", "triton", "best")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("flashy", needs(), "unknown attention backend 'flashy'"),
        ("fa3", needs((10, 0)), "8.x and 9.x, not 10.0"),
        ("fa3", needs(device="cpu"), "needs a CUDA device"),
        ("flashinfer", needs(installed={"triton"}), "flashinfer is not installed"),
        ("flashinfer", needs(head_dim=80), "head dims .* not 80"),
        ("fa3", needs(model_bytes=4), "float16 and bfloat16 only"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(name, given, message):
    with pytest.raises(ValueError, match=message):
        choose_attention(given, both=name, cpu="torch_native")


def test_plain_torch_works_everywhere():
    assert why_not("torch_native", needs(device="cpu")) is None
