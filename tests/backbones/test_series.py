"""The obvious series of blocks of a model that is not known, its stages, and several series as parts."""

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse import backbones


def block(width: int = 8, out: int | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(width, out or width), nn.GELU())


class Net(nn.Module):
    """Blocks in a list, with small lists around that are not blocks."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for part in self.blocks:
            x = part(x)
        return self.heads[0](x)


class Stages(nn.Module):
    """Four stages as attributes, the way of ResNet, each with its own width."""

    def __init__(self) -> None:
        super().__init__()
        for number, (width, out) in enumerate([(4, 8), (8, 16), (16, 24), (24, 32)], start=1):
            setattr(self, f"layer{number}", nn.Sequential(block(width, out), block(out)))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        return x


class Towers(nn.Module):
    """Two series; the second one runs only on pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(), Net(2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.left(x) if y is None else self.left(x) + self.right(y)


def names(model: nn.Module) -> list[str]:
    return [b.name for b in backbones.find(model).blocks]


def test_the_list_of_blocks_is_taken_with_a_remark() -> None:
    stack = backbones.find(Net())
    assert [b.name for b in stack.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert "3 × Sequential in blocks" in stack.remark
    d = uc.diagnose(Net(), [torch.randn(4, 6, 8)])
    assert any("3 × Sequential in blocks" in caution for caution in d.verdict.cautions)


def test_attach_warns_of_what_it_took() -> None:
    with pytest.warns(UserWarning, match="Sequential in"):
        uc.attach(Net(), "contra_norm", scale=0.1, causal=False)


def test_stages_are_layers_with_their_own_widths() -> None:
    assert names(Stages()) == ["layer1", "layer2", "layer3", "layer4"]
    d = uc.diagnose(Stages(), [torch.randn(4, 6, 4)])
    assert [layer.dim for layer in d.layers] == [4, 8, 16, 24, 32]


def test_lists_within_blocks_are_not_series() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(block(), block()) for _ in range(3))})
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_first_module_of_another_kind_does_not_matter() -> None:
    features = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1)), *(block() for _ in range(4)), nn.Flatten())
    assert names(nn.ModuleDict({"features": features})) == [f"features.{number}" for number in range(5)]


def test_recurrent_layers_are_blocks() -> None:
    assert len(names(nn.ModuleDict({"layers": nn.ModuleList(nn.GRU(4, 4) for _ in range(3))}))) == 3


def test_two_series_are_two_parts() -> None:
    x = torch.randn(4, 6, 8)
    d = uc.diagnose(Towers(), [(x, x)], call=lambda model, batch: model(*batch))
    assert [one.settings["part"] for one in (d, *d.others)] == ["left.blocks", "right.blocks"]
    assert [len(one.layers) for one in (d, *d.others)] == [4, 3]
    alone = uc.diagnose(Towers(), [x])
    assert alone.others == ()
    assert any("right.blocks" in caution and "did not run" in caution for caution in alone.verdict.cautions)
    with pytest.raises(ValueError, match=r"part='left\.blocks'"):
        uc.attach(Towers(), "contra_norm", scale=0.1)
    with pytest.raises(ValueError, match="select one"):
        uc.diagnose(Towers(), [x], layers="last")


def test_parts_are_saved_printed_and_reported(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("plotly")
    x = torch.randn(4, 6, 8)
    d = uc.diagnose(Towers(), [(x, x)], call=lambda model, batch: model(*batch))
    assert uc.Diagnosis.load(d.save(tmp_path / "d.json")) == d
    assert "right.blocks" in str(d)
    page = d.report(tmp_path / "report.html").read_text()
    assert "2 parts of one model" in page
    assert "What differs" not in page


def test_a_part_of_several_lists_has_the_name_that_is_listed() -> None:
    lists = {f"{kind}{n}": nn.ModuleList(block() for _ in range(2)) for kind in ("serial", "parallel") for n in (1, 2)}
    model = nn.ModuleDict(lists)
    found = backbones.find_all(model)
    assert [len(stack.blocks) for stack in found] == [4, 4]
    for name in backbones.part_names(found):
        assert len(backbones.find(model, part=name).blocks) == 4


class KnownAndUnknown(nn.Module):
    """A tower that a backbone knows, and one that none knows."""

    def __init__(self, unknown: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.known = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.own = Net(unknown)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.known(x), self.own(x)


def test_a_tower_next_to_a_known_one_is_a_part_of_its_own() -> None:
    d = uc.diagnose(KnownAndUnknown(8).eval(), [torch.randn(4, 6, 8)])
    assert [one.settings["part"] for one in (d, *d.others)] == ["known", "own.blocks"]
    assert any("8 × Sequential in own.blocks" in caution for caution in d.others[0].verdict.cautions)


def test_a_small_head_next_to_a_known_model_is_not_a_part() -> None:
    assert [stack.path for stack in backbones.find_all(KnownAndUnknown(2))] == ["known"]


def test_a_large_series_after_the_blocks_of_a_known_model_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes))
    assert backbones.find(bert).remark == ""
    vits = transformers.VitsConfig(
        **{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16, "flow_size": 8},
        **{"spectrogram_bins": 9, "upsample_initial_channel": 16, "duration_predictor_filter_channels": 8},
        **{"posterior_encoder_num_wavenet_layers": 2},
    )
    assert "4 × VitsResidualCouplingLayer in flow.flows" in backbones.find(transformers.VitsModel(vits)).remark


class Small(nn.Module):
    """A known encoder, and next to it a series with a fifth of its weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.tail = nn.TransformerEncoder(layer, 2), nn.Module()
        self.tail.blocks = nn.ModuleList(block(8, 11) if n == 0 else block(11, 8) for n in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for part in self.tail.blocks:
            x = part(x)
        return x


def test_a_series_too_small_for_a_part_next_to_a_known_one_is_mentioned() -> None:
    model = Small()
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model.tail, model.encoder)]
    assert 0.1 < sizes[0] / sizes[1] < 0.25
    d = uc.diagnose(model, [torch.randn(4, 6, 8)], plan=uc.Plan(baseline=0))
    assert not d.others
    assert any("2 × Sequential in tail.blocks" in caution for caution in d.verdict.cautions)
