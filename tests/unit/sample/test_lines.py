"""What a sampling says before its first step and after its last."""

from wandistiller import api


def test_what_it_will_take_and_what_it_took(tmp_path, capsys):
    api.sample(model="tiny-random", prompt="x", steps=2, output=tmp_path / "x.png")
    said = capsys.readouterr().err
    assert said.index("Predicted: about") < said.index("Measured:") and "a step; predicted were" in said
