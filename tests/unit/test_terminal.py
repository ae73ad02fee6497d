"""What is printed is what was said."""

from wandistiller.terminal import say


def test_words_between_colons_and_brackets_are_no_pictures(capsys):
    say("world-heldout:100:1x64x64 [red] and :smile:")
    assert capsys.readouterr().err == "world-heldout:100:1x64x64 [red] and :smile:\n"
